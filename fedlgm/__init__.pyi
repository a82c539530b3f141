# The public names of this package, which load when they are first used; this list is the only one.

from . import aggregation as aggregation
from . import check as check
from . import data as data
from . import errors as errors
from . import extension as extension
from . import mechanisms as mechanisms
from . import noise as noise
from . import papers as papers
from . import planning as planning
from . import privacy as privacy
from . import training as training
from .aggregation import BoundedSum as BoundedSum
from .aggregation.contributions import BoundedUpdates as BoundedUpdates
from .data import DataSet as DataSet
from .data import Partition as Partition
from .extension import testing as testing
from .mechanisms.mechanism import Mechanism as Mechanism
from .mechanisms.method import Method as Method
from .noise import correlation as correlation
from .noise import integer_noise as integer_noise
from .noise import keys as keys
from .noise import release as release
from .noise.keys import KeyRing as KeyRing
from .planning import allocation as allocation
from .planning import clipping as clipping
from .planning import layers as layers
from .planning import plan as plan
from .planning import queries as queries
from .planning import transcript as transcript
from .planning.facts import LocalTraining as LocalTraining
from .planning.facts import RunFacts as RunFacts
from .planning.facts import Sampling as Sampling
from .planning.layers import LayerTable as LayerTable
from .planning.plan import ReleasePlan as ReleasePlan
from .planning.plan import UnprotectedPlan as UnprotectedPlan
from .planning.queries import AuxiliaryQuery as AuxiliaryQuery
from .planning.transcript import Transcript as Transcript
from .privacy.guarantee import Guarantee as Guarantee
from .privacy.ledger import Ledger as Ledger
from .training import devices as devices
from .training import example_level as example_level
from .training import models as models
from .training import tasks as tasks
from .training.tasks import Task as Task

__version__: str
