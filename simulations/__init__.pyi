# The public names of this package, which load when they are first used; this list is the only one.

from .api import RunResult as RunResult
from .api import load_recipe as load_recipe
from .api import resume as resume
from .api import simulate as simulate
from .config.recipe import Recipe as Recipe
from .standardise import standardise as standardise
from .tools import Study as Study
from .tools import difference as difference
from .tools import recommend as recommend
from .tools import study as study
from .tools import tune as tune
