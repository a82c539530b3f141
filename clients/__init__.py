"""Flower client side of fedlgm.

Names load when they are first used, because a process that only forwards messages to a release
service needs no torch.
"""

import lazy_loader

from fedlgm.package_conflicts import refuse_shadowed_packages

refuse_shadowed_packages()

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
