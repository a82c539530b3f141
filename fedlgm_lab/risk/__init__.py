"""`fedlgm risk`, which measures on public data how far the layers of a recipe's model reveal
membership.
"""
