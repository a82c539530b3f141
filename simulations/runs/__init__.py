"""A run: its folder, its records, and its server side."""
