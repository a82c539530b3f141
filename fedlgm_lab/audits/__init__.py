"""Audits: lower bounds on the true epsilon of releases, to compare with the claimed and proven values.

    from fedlgm.audits import Audit, Subject, audit_release

    Audit().mechanism(Subject.of("snr-consistent"))      # a registered mechanism, through the public release path
    audit_release(release, epsilon=1.0, delta=1e-5)      # any function that releases one of two neighbouring inputs
    Canaries(layers, count, keys)                        # canaries for your own run

`fedlgm_lab.audits.bounds` (for counted guesses) and `fedlgm_lab.audits.gaussian_scores` state each bound's assumptions.
"""

from fedlgm.noise.release import ReleaseObserver
from fedlgm_lab.audits.audit import Audit, OwnAudit, register, reported_of, watch
from fedlgm_lab.audits.canaries import Canaries
from fedlgm_lab.audits.distinguisher import audit_release
from fedlgm_lab.audits.one_run import audit_record
from fedlgm_lab.audits.record import CanaryRecord
from fedlgm_lab.audits.result import AdversaryRow, AuditResult, Check, LayerRow, Method, Reported
from fedlgm_lab.audits.scores import CONFIDENCE, Scores
from fedlgm_lab.audits.subject import Subject

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
