"""`fedlgm risk`: which layers of a recipe's model reveal membership, measured only on public data."""
