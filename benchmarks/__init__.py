"""Measurements behind docs/results; every module runs as `python -m benchmarks.NAME`."""
