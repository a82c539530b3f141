"""Plans of releases: facts of the run, layers, bounds, trust, charging and the plan itself."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
