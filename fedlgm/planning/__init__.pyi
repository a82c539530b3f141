# The public names of this package, which load when they are first used; this list is the only one.

from . import allocation as allocation
from . import charging as charging
from . import clipping as clipping
from . import distributed_trust as distributed_trust
from . import facts as facts
from . import filling as filling
from . import layers as layers
from . import layout as layout
from . import plan as plan
from . import queries as queries
from . import run_rules as run_rules
from . import transcript as transcript
from . import trust as trust
from . import upload_caps as upload_caps
