"""Noise that clients add in integer shares, so that a server sees only the noised sum."""

from fedlgm.distributed.words import noise_over_central, wrap_probability

__all__ = ["noise_over_central", "wrap_probability"]
