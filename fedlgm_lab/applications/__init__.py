"""Coordinate descent and PCA as federations."""
