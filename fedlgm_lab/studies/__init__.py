"""Studies: many runs side by side, and statistics of their figures."""
