"""Attacks that measure what a federation reveals: inversion, membership inference, class
reconstruction.

The documentation of every attack states what its attacker knows. The attacks measure leakage in
simulations, where the private data are available for comparison. A failed attack proves nothing;
only an accountant gives an upper bound on leakage.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
