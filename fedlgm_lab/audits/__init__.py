"""Audits: lower bounds on the true epsilon of releases, for comparison with the claimed and proven
epsilons.

    from fedlgm_lab.audits import Audit, Subject, audit_release

    Audit().mechanism(Subject.of("snr-consistent"))  # a registered mechanism
    audit_release(release, epsilon=1.0, delta=1e-5)  # a function that releases one of two inputs
    Canaries(layers, count, keys)                    # canaries for your own run

The assumptions of each bound are stated in `fedlgm_lab.audits.bounds` (bounds from counted guesses)
and in `fedlgm_lab.audits.gaussian_scores` (bounds from Gaussian scores).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
