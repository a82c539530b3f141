"""Audits: lower bounds on the true epsilon of releases, to compare with the claimed and proven
values.

    from fedlgm_lab.audits import Audit, Subject, audit_release

    Audit().mechanism(Subject.of("snr-consistent"))  # a registered mechanism, on the public path
    audit_release(release, epsilon=1.0, delta=1e-5)  # a function that releases one of two inputs
    Canaries(layers, count, keys)                    # canaries for your own run

`fedlgm_lab.audits.bounds` (for counted guesses) and `fedlgm_lab.audits.gaussian_scores` state each
bound's assumptions.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
