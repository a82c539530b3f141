"""`fedlgm attack`: the attacks of `fedlgm.attacks` on recipes and finished runs."""
