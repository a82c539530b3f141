# The public names of this package, which load when they are first used; this list is the only one.

from .audit import Audit as Audit
from .audit import OwnAudit as OwnAudit
from .audit import register as register
from .audit import reported_of as reported_of
from .audit import watch as watch
from .canaries import Canaries as Canaries
from .distinguisher import audit_release as audit_release
from .one_run import audit_record as audit_record
from .record import CanaryRecord as CanaryRecord
from .result import AdversaryRow as AdversaryRow
from .result import AuditResult as AuditResult
from .result import Check as Check
from .result import LayerRow as LayerRow
from .result import Method as Method
from .result import Reported as Reported
from .scores import CONFIDENCE as CONFIDENCE
from .scores import Scores as Scores
from .subject import Subject as Subject
