# The public names of this package, which load when they are first used; this list is the only one.

from .advice.recommend import recommend as recommend
from .api import RunResult as RunResult
from .api import load_recipe as load_recipe
from .api import resume as resume
from .api import simulate as simulate
from .config.recipe import Recipe as Recipe
from .standardise import standardise as standardise
from .studies.results import Study as Study
from .studies.statistics import difference as difference
from .studies.study import study as study
from .tuning.tune import tune as tune
