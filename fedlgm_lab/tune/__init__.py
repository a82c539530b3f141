"""Private selection, that is, searches that publish the best of a secret number of runs."""
