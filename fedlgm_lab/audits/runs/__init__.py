"""Audits of recipes and runs, and the `fedlgm audit` command."""
