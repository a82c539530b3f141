"""Uses of layer-wise and i.n.i.d. noise beyond neural networks: coordinate descent and principal components."""
