# The public names of this package, which load when they are first used; this list is the only one.

from . import accountants as accountants
from . import accounting as accounting
from . import attackers as attackers
from . import cost as cost
from . import events as events
from . import gaussian as gaussian
from . import guarantee as guarantee
from . import ledger as ledger
from . import participation as participation
from . import whole_run as whole_run
from .accounting import calibrate as calibrate
from .accounting import composed_epsilon as composed_epsilon
from .accounting import epsilon as epsilon
from .attackers import AttackRates as AttackRates
from .attackers import attack_rates as attack_rates
from .distributed import discrete_gaussian_tau as discrete_gaussian_tau
from .distributed import distributed_epsilon as distributed_epsilon
from .events import DpEvent as DpEvent
from .gaussian import gaussian_delta as gaussian_delta
from .gaussian import gaussian_epsilon as gaussian_epsilon
from .gaussian import gaussian_mu as gaussian_mu
from .guarantee import Guarantee as Guarantee
from .ledger import Ledger as Ledger
from .selection import selection_epsilon as selection_epsilon
