"""A further accountant, as CONTRIBUTING describes one, states its own figure and no other."""

from __future__ import annotations

from typing import Any

import dp_accounting
import pytest

from fedlgm.errors import PrivacyError
from fedlgm.extension.registry import Registry
from fedlgm.privacy import accountants
from fedlgm.privacy.accounting import composed_epsilon
from fedlgm.privacy.events import AllocationDpEvent, gaussian_event


class Fifty(dp_accounting.PrivacyAccountant):
    """States an epsilon of 50 for every sampled release, and knows nothing else."""

    def __init__(self) -> None:
        super().__init__(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)

    def _maybe_compose(self, event: Any, count: int, do_compose: bool) -> Any:
        known = isinstance(event, dp_accounting.PoissonSampledDpEvent)
        return None if known else self.CompositionErrorDetails(event, "unknown")

    def get_epsilon(self, target_delta: float) -> float:
        return 50.0


@pytest.fixture(autouse=True)
def _fifty(monkeypatch: pytest.MonkeyPatch) -> None:
    items = {**dict(accountants._ACCOUNTANTS.items()), "fifty": lambda events: Fifty()}
    monkeypatch.setattr(accountants, "_ACCOUNTANTS", Registry("accountant", items))


@pytest.mark.parametrize("delta", [1e-5, 1e-17])
def test_it_is_asked_at_every_delta(delta: float) -> None:
    """A grid does not resolve the second one, where RDP has a smaller epsilon."""
    events = [(gaussian_event(1.0, 0.1), 10)]
    assert composed_epsilon(events, delta, "rdp") < 50
    assert composed_epsilon(events, delta, "fifty") == 50


def test_a_refusal_names_the_accountants_that_know_the_event() -> None:
    allocated = AllocationDpEvent(gaussian_event(1.0), 1, 10)
    with pytest.raises(PrivacyError, match=r"the fifty accountant .*; use accountant = 'pld'$"):
        composed_epsilon([(allocated, 1)], 1e-5, "fifty")
