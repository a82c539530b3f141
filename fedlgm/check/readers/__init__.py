"""Readers of other frameworks' statements about a run, one in each file.

Each reader takes objects, whose attributes it reads, or the values of a configuration. Further
keyword arguments are settings (`Settings`), which replace what was read.
"""
