"""`fedlgm attack`: the attacks of `fedlgm_lab.attacks` on recipes and finished runs."""
