"""Code for the i.n.i.d. noise paper's experiments. `fedlgm.mechanisms.inid` computes the paper's
noise.
"""
