"""Everything that launches: recipes, engines, the Flower app, the command line and reports.

>>> import simulations
>>> sorted(simulations.__all__)
['Recipe', 'RunResult', 'Study', 'difference', 'load_recipe', 'recommend', 'resume', 'simulate', 'standardise', 'study', 'tune']
"""

import lazy_loader

from fedlgm.neighbours import check_neighbours

check_neighbours()

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
