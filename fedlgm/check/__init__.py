"""A second opinion on the epsilon of a training run in any framework.

The package reads objects of Opacus and Flower by their attributes, without importing these
frameworks.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
