# The public names of this package, which load when they are first used; this list is the only one.

from . import client_release as client_release
from . import contributions as contributions
from .bounded_sum import BoundedSum as BoundedSum
from .bounded_sum import bound_each as bound_each
from .bounded_sum import bound_update as bound_update
from .bounded_sum import clip_factors as clip_factors
from .device_sum import DeviceSum as DeviceSum
from .device_sum import bound_on as bound_on
from .device_sum import part_offsets as part_offsets
from .device_sum import sum_on as sum_on
