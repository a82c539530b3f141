"""Makers of the tables and figures that are not grids of runs: see `maker`."""
