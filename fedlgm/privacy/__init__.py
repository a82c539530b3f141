"""Accounting, guarantees and the durable ledger.

Names load on first use: processes that only train need no accountant, which takes a second to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlgm.privacy import accountants, accounting, cost, events, gaussian, guarantee, ledger, whole_run
    from fedlgm.privacy.accounting import calibrate, composed_epsilon, epsilon
    from fedlgm.privacy.distributed import discrete_gaussian_tau, distributed_epsilon
    from fedlgm.privacy.gaussian import gaussian_delta, gaussian_epsilon, gaussian_mu
    from fedlgm.privacy.guarantee import Guarantee
    from fedlgm.privacy.ledger import Ledger
    from fedlgm.privacy.selection import selection_epsilon

__all__ = [
    "Guarantee",
    "Ledger",
    "accountants",
    "accounting",
    "calibrate",
    "composed_epsilon",
    "cost",
    "discrete_gaussian_tau",
    "distributed_epsilon",
    "epsilon",
    "events",
    "gaussian",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_mu",
    "guarantee",
    "ledger",
    "selection_epsilon",
    "whole_run",
]

_HOMES = {
    "accountants": (),
    "accounting": ("calibrate", "composed_epsilon", "epsilon"),
    "cost": (),
    "distributed": ("discrete_gaussian_tau", "distributed_epsilon"),
    "events": (),
    "gaussian": ("gaussian_delta", "gaussian_epsilon", "gaussian_mu"),
    "guarantee": ("Guarantee",),
    "ledger": ("Ledger",),
    "selection": ("selection_epsilon",),
    "whole_run": (),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name == module or name in names:
            home = importlib.import_module(f"fedlgm.privacy.{module}")
            return home if name == module else getattr(home, name)
    raise AttributeError(f"module 'fedlgm.privacy' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
