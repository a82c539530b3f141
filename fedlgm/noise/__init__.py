"""Noise: keys, draws, correlation over rounds, and the only place that adds noise to a sum."""
