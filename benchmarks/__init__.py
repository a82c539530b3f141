"""Measurements of speed and memory; every module runs as `python -m benchmarks.NAME`."""
