"""Cost of the private step and of whole private rounds on a GPU."""
