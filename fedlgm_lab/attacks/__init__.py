"""Attacks that measure what a federation reveals: inversion, membership inference, class
reconstruction.

Every attack states the knowledge of its attacker. The attacks measure leakage on simulations, where
the private data are available for comparison. A failed attack proves nothing; only an accountant
gives an upper bound.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
