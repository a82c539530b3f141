"""Simulators that do the same work, each in a separate process, one round at a time on demand."""
