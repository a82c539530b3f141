# The public names of this package, which load when they are first used; this list is the only one.

from . import correlation as correlation
from . import draws as draws
from . import integer as integer
from . import integer_noise as integer_noise
from . import keys as keys
from . import release as release
from . import run_noise as run_noise
from .draws import Family as Family
from .draws import NoiseBackend as NoiseBackend
from .draws import add_noise_ as add_noise_
from .draws import draw as draw
