"""Benchmarks of speed and memory; each is run with `python -m benchmarks.NAME`."""
