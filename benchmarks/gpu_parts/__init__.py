"""What the private step and whole private rounds cost on a GPU."""
