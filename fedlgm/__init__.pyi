# The public names of this package, which load when they are first used; this list is the only one.

from . import aggregation as aggregation
from . import allocation as allocation
from . import attacks as attacks
from . import audits as audits
from . import clipping as clipping
from . import correlation as correlation
from . import data as data
from . import devices as devices
from . import errors as errors
from . import example_level as example_level
from . import integer_noise as integer_noise
from . import keys as keys
from . import layers as layers
from . import mechanisms as mechanisms
from . import models as models
from . import noise as noise
from . import papers as papers
from . import plan as plan
from . import privacy as privacy
from . import queries as queries
from . import release as release
from . import secagg as secagg
from . import tasks as tasks
from . import testing as testing
from . import training as training
from . import transcript as transcript
from .aggregation import BoundedSum as BoundedSum
from .contributions import BoundedUpdates as BoundedUpdates
from .data import DataSet as DataSet
from .data import Partition as Partition
from .facts import LocalTraining as LocalTraining
from .facts import RunFacts as RunFacts
from .facts import Sampling as Sampling
from .keys import KeyRing as KeyRing
from .layers import LayerTable as LayerTable
from .mechanisms.base import Mechanism as Mechanism
from .mechanisms.method import Method as Method
from .plan import ReleasePlan as ReleasePlan
from .plan import UnprotectedPlan as UnprotectedPlan
from .privacy.guarantee import Guarantee as Guarantee
from .privacy.ledger import Ledger as Ledger
from .queries import AuxiliaryQuery as AuxiliaryQuery
from .tasks import Task as Task
from .transcript import Transcript as Transcript

__version__: str
