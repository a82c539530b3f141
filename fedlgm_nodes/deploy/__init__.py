"""Federations of real nodes on Flower, with commands to create, start, use and stop them."""
