"""Everything that starts a run: recipes, engines, the Flower app, the command line and reports.

>>> import simulations
>>> "simulate" in simulations.__all__, "standardise" in simulations.__all__
(True, True)
"""

import lazy_loader

from fedlgm.package_conflicts import refuse_shadowed_packages, refuse_windows

refuse_windows()
refuse_shadowed_packages()

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
