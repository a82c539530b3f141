"""Federations of real nodes on Flower: create, start, use and stop them."""
