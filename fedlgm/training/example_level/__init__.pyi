# The public names of this package, which load when they are first used; this list is the only one.

from .engine import ClippedSum as ClippedSum
from .engine import ExampleGradients as ExampleGradients
from .one_batch import clipped_sum as clipped_sum
from .scaling import PSAC as PSAC
from .scaling import AutoS as AutoS
from .scaling import FlatClip as FlatClip
from .scaling import PerLayerClip as PerLayerClip
from .scaling import Reweighted as Reweighted
from .scaling import Scaling as Scaling
