"""Private selection: searches that publish the best of a secret number of runs."""
