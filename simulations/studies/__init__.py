"""Studies: many runs beside each other, and what their figures show."""
