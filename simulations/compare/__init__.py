"""Sets of runs side by side."""
