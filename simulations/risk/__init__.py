"""`fedlgm risk`: which layers of a recipe's model reveal membership, measured on public data alone."""
