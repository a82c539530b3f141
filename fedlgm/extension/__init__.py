"""Support for users' own objects: how they are named, loaded, registered, tried, isolated and
tested.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
