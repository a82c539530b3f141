"""Audits: lower bounds on the true epsilon of releases, to compare with the claimed and proven values.

    from fedlgm.audits import Audit, Subject, audit_release

    Audit().mechanism(Subject.of("snr-consistent"))      # a registered mechanism, through the public release path
    audit_release(release, epsilon=1.0, delta=1e-5)      # any function that releases one of two neighbouring inputs
    Canaries(layers, count, keys)                        # canaries for your own run

`fedlgm.audits.bounds` (for counted guesses) and `fedlgm.audits.gaussian_scores` state each bound's assumptions.
"""

from fedlgm.audits.audit import Audit, OwnAudit, register, reported_of, watch
from fedlgm.audits.canaries import Canaries
from fedlgm.audits.distinguisher import audit_release
from fedlgm.audits.one_run import audit_record
from fedlgm.audits.record import CanaryRecord
from fedlgm.audits.result import AdversaryRow, AuditResult, Check, LayerRow, Method, Reported
from fedlgm.audits.scores import CONFIDENCE, Scores
from fedlgm.audits.subject import Subject
from fedlgm.release import ReleaseObserver

__all__ = [
    "CONFIDENCE",
    "AdversaryRow",
    "Audit",
    "AuditResult",
    "Canaries",
    "CanaryRecord",
    "Check",
    "LayerRow",
    "Method",
    "OwnAudit",
    "ReleaseObserver",
    "Reported",
    "Scores",
    "Subject",
    "audit_record",
    "audit_release",
    "register",
    "reported_of",
    "watch",
]
