"""Accounting, guarantees and the durable ledger."""

from fedlgm.privacy.accounting import calibrate, composed_epsilon, epsilon
from fedlgm.privacy.gaussian import gaussian_delta, gaussian_epsilon, gaussian_mu
from fedlgm.privacy.guarantee import Guarantee
from fedlgm.privacy.ledger import Ledger

__all__ = [
    "Guarantee",
    "Ledger",
    "calibrate",
    "composed_epsilon",
    "epsilon",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_mu",
]
