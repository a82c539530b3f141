# The public names of this package, which load when they are first used; this list is the only one.

from . import devices as devices
from . import example_level as example_level
from . import inputs as inputs
from . import models as models
from . import tasks as tasks
from .base import ClientTask as ClientTask
from .base import LocalTraining as LocalTraining
from .base import Trainer as Trainer
from .choice import fastest as fastest
from .fedprox import FedProx as FedProx
from .fedprox import VectorizedFedProx as VectorizedFedProx
from .mixed import MixedPrecisionTrainer as MixedPrecisionTrainer
from .native import NativeTrainer as NativeTrainer
from .native import instruction_set as instruction_set
from .optimizers import FlatOptimizer as FlatOptimizer
from .scheduled import ScheduledTrainer as ScheduledTrainer
from .sequential import SequentialTrainer as SequentialTrainer
from .vectorized import VectorizedTrainer as VectorizedTrainer
