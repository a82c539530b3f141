"""A run: its folder, what is recorded of it, and its server side."""
