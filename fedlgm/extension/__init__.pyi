# The public names of this package, which load when they are first used; this list is the only one.

from . import loader as loader
from . import per_row as per_row
from . import registration as registration
from . import restored as restored
from . import separation as separation
from . import testing as testing
from . import trial as trial
