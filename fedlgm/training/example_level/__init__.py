"""Example-level privacy: sums of clipped per-example gradients.

Each name is imported when it is first used, because runs that protect whole clients do not need
this package.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
