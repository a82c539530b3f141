"""The i.n.i.d. noise paper: coordinate descent and principal components. `fedlgm.mechanisms.inid`
has its noise.
"""
