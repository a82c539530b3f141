"""Example-level privacy: sums of clipped per-example gradients.

Names load when they are first used, because runs that protect clients do not need the engine.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
