"""Readers of what other frameworks tell about a run. Each reader is in a separate file.

A reader takes objects, whose attributes it reads, or the values of a configuration. Further keyword
arguments are settings (see `Settings`). They replace assumed defaults, but may not contradict what
was read.
"""
