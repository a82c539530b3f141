"""Simulators that do the same work, each in a process of its own, one round at a time on demand."""
