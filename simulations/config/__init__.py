"""Recipes and the objects that they define."""
