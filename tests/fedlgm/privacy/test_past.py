"""A long past is composed once, and figures with it are those of composing everything afresh."""

import math

import pytest
from dp_accounting import dp_event
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlgm.privacy import accountants, composed_epsilon
from fedlgm.privacy import past as past_module
from fedlgm.privacy.accounting import is_resolved
from fedlgm.privacy.events import gaussian_event
from fedlgm.privacy.past import FEW, Past

KINDS = [gaussian_event(1.5 + i / 10, 0.05) for i in range(FEW + 4)]
SOME = KINDS[:5]


@settings(max_examples=4, deadline=None)
@given(
    counts=st.lists(st.integers(1, 20), min_size=len(SOME), max_size=len(SOME)),
    later=st.lists(st.sampled_from(range(len(SOME))), max_size=2),
    plain=st.lists(st.floats(5.0, 50.0), max_size=3),
    further=st.sampled_from(
        [None, gaussian_event(2.0, 0.3), gaussian_event(9.0), gaussian_event(0.2, 0.05)]
    ),
)
def test_figures_are_those_of_composing_everything(counts, later, plain, further):
    past, grown = Past(), list(counts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(past_module, "FEW", 3)  # all of `SOME` are composed once
        for kind in (None, *later):
            if kind is not None:
                grown[kind] += 1
            charged = [
                *zip(SOME, grown, strict=True),
                *((gaussian_event(noise), 2) for noise in plain),
            ]
            whole = charged if further is None else [*charged, (further, 1)]
            epsilon = past.epsilon(charged, 1e-5, further)
            assert math.isclose(epsilon, composed_epsilon(whole, 1e-5), rel_tol=1e-8)
        first = list(zip(SOME, counts, strict=True))
        # A past that has shrunk is another one, and is composed anew.
        assert math.isclose(past.epsilon(first, 1e-5), composed_epsilon(first, 1e-5), rel_tol=1e-8)


@pytest.mark.parametrize("steps", [1, 5])
def test_what_was_composed_is_not_composed_again(monkeypatch, steps):
    """Neither after a further release with so little noise that it needs a coarser grid."""
    composed, compose = [], accountants.PldAccountant.compose
    monkeypatch.setattr(
        accountants.PldAccountant,
        "compose",
        lambda own, event, count=1: (composed.append(count), compose(own, event, count))[1],
    )
    kinds = [dp_event.SelfComposedDpEvent(kind, steps) for kind in KINDS] if steps > 1 else KINDS
    further = dp_event.SelfComposedDpEvent(gaussian_event(2.0, 0.3), steps)
    past, charged = Past(), [(kind, 10) for kind in kinds]
    past.epsilon(charged, 1e-5, further)
    assert composed == [10 * steps] * len(KINDS) + [steps]
    past.epsilon(charged, 1e-5, gaussian_event(0.2, 0.05))
    composed.clear()
    charged[3] = (kinds[3], 12)
    past.epsilon(charged, 1e-5, further)
    assert composed == [2 * steps, steps]


def test_what_grids_lose_of_a_very_long_past_is_paid():
    """Composing it afresh for each answer would take seconds."""
    kinds = [gaussian_event(3.0 + i / 10, 1e-3) for i in range(FEW + 4)]
    charged = [(kind, 10_000) for kind in kinds]
    assert not is_resolved(charged, 1e-5)
    past = Past().epsilon(charged, 1e-5, kinds[0])
    afresh = composed_epsilon([*charged, (kinds[0], 1)], 1e-5)
    assert afresh * (1 - 1e-8) <= past <= afresh * 1.02


@pytest.mark.parametrize("delta", [0.0, 1e-12])
def test_deltas_that_grids_do_not_resolve_are_composed_afresh(delta):
    charged = [(kind, 10) for kind in KINDS]
    assert Past().epsilon(charged, delta) == composed_epsilon(charged, delta)


def test_releases_that_are_not_private_have_no_epsilon():
    charged = [*((kind, 1) for kind in KINDS), (dp_event.NonPrivateDpEvent(), 1)]
    assert Past().epsilon(charged, 1e-5) == math.inf
