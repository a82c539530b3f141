"""The i.n.i.d. noise paper: coordinate descent and principal components. Its noise is `fedlgm.mechanisms.inid`."""
