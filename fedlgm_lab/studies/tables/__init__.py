"""Makers of the tables and figures that no grid of runs makes, see `maker`."""
