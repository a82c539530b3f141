"""Readers that find out about a run from objects or configurations of other frameworks.

A reader takes objects, whose attributes it reads, or the values of a configuration. Further keyword
arguments are settings (see `Settings`). They replace assumed defaults, but may not contradict what
was read.
"""
