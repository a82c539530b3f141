"""Federations of real nodes on Flower: made, started, used and stopped."""
