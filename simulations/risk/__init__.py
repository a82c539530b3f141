"""`fedlgm risk`: which layers of a recipe's model give membership away, measured on public data alone."""
