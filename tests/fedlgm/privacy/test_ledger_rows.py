"""A ledger takes no row that it could not read again, compose or compare with its other rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import dp_event

from fedlgm.errors import ConfigError, LedgerError
from fedlgm.privacy import Ledger
from fedlgm.privacy.events import encode, gaussian_event, pure_event
from fedlgm.privacy.guarantee import Guarantee

GAUSS = dp_event.GaussianDpEvent(2.0)
CLIENT = "client, add-remove"


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite", "run") as ledger:
        yield ledger
        ledger.verify(owner="run")


@pytest.mark.parametrize("round", [-3, 1.5, True, math.nan, "1", None])
def test_a_round_is_a_whole_number(ledger, round):
    with pytest.raises(
        ConfigError, match="the round of a charge must be a whole number of at least 0"
    ):
        ledger.charge(GAUSS, round=round, key="k")
    assert ledger.position() == 0


@pytest.mark.parametrize("client", [-5, 1.5, False, "a", None])
def test_a_client_is_a_whole_number(ledger, client):
    with pytest.raises(
        ConfigError, match="the client of a charge must be a whole number of at least -1"
    ):
        ledger.charge(GAUSS, round=1, key="k", client=client)
    assert ledger.position() == 0


def test_numpy_numbers_are_the_rows_of_plain_ones(ledger, tmp_path):
    """They were stored as bytes, so that no later reader could verify the ledger."""
    rows = {np.int64(3): "a"}
    ledger.charge_each(dp_event.GaussianDpEvent(np.float32(2.0)), round=np.int64(2), keys=rows)
    with Ledger(tmp_path / "plain.sqlite", "run") as plain:
        plain.charge(GAUSS, round=2, client=3, key="a")
        assert plain.head() == ledger.head()


GAUSS_OF = dp_event.GaussianDpEvent
IMPOSSIBLE = [
    GAUSS_OF(math.nan),
    GAUSS_OF(-2.0),
    GAUSS_OF(True),
    GAUSS_OF("2"),
    dp_event.LaplaceDpEvent(-1.0),
    dp_event.ZCDpEvent(-1.0),
    dp_event.RandomizedResponseDpEvent(2.0, 2),
    dp_event.PoissonSampledDpEvent(math.nan, GAUSS),
    dp_event.PoissonSampledDpEvent(1.5, GAUSS),
    dp_event.SelfComposedDpEvent(GAUSS, -4),
    dp_event.ComposedDpEvent([GAUSS, GAUSS_OF(math.nan)]),
    dp_event.PoissonSampledDpEvent(0.1, dp_event.SelfComposedDpEvent(GAUSS_OF(-1.0), 2)),
]


@pytest.mark.parametrize("event", IMPOSSIBLE, ids=str)
def test_an_event_has_possible_numbers(ledger, event):
    """Charged, its row stays for good, and every later epsilon of the ledger fails or is wrong."""
    with pytest.raises(ConfigError, match=r"DpEvent: .*, got "):
        ledger.charge(event, round=1, key="k")
    assert ledger.position() == 0
    with pytest.raises(ConfigError):
        ledger.charge(
            GAUSS,
            round=1,
            key="k",
            claim={"event": {"type": "GaussianDpEvent", "noise_multiplier": -1.0}},
        )


CLAIMS = [
    {"epsilon": -5.0},
    {"epsilon": math.nan},
    {"epsilon": "1"},
    {"epsilon": True},
    {"x": 1},
    [1],
    {"event": 3},
]


@pytest.mark.parametrize("claim", CLAIMS, ids=str)
def test_a_claim_is_an_epsilon_or_an_event(ledger, claim):
    with pytest.raises(ConfigError, match="a claim is"):
        ledger.charge(GAUSS, round=1, key="k", claim=claim)
    ledger.charge(GAUSS, round=1, key="k", claim={"epsilon": 0})
    ledger.charge(GAUSS, round=2, key="k", claim={"event": encode(gaussian_event(3.0))})


@pytest.mark.parametrize("key", [None, 3, "", b"k"])
def test_a_key_is_a_name(ledger, key):
    with pytest.raises(ConfigError, match="the key of a charge"):
        ledger.charge(GAUSS, round=1, key=key)


@pytest.mark.parametrize("protects", ["anything", "client", "add-remove, client", None, 3])
def test_a_protection_is_a_unit_and_a_relation(ledger, protects):
    with pytest.raises(ConfigError, match="a charge protects a unit under a relation"):
        ledger.charge(GAUSS, round=1, key="1", protects=protects)


@pytest.mark.parametrize(("first", "second"), [(CLIENT, ""), ("", CLIENT)])
def test_rows_that_state_no_protection_are_not_added_to_rows_that_do(ledger, first, second):
    ledger.charge(GAUSS, round=1, key="1", protects=first)
    with pytest.raises(
        LedgerError, match=r"states no protection.*state unit and relation for both"
    ):
        ledger.charge(GAUSS, round=2, key="2", protects=second)
    ledger.charge(GAUSS, round=2, key="2", protects=first)
    assert (ledger.position(), ledger.protects()) == (2, first)


def test_a_pure_release_of_almost_no_cost_can_be_charged(ledger):
    ledger.charge(pure_event(1e-18), round=1, key="k")
    assert 0 < ledger.epsilon(1e-5) < 1e-3


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            {"status": "certain"},
            "a guarantee: unknown status 'certain'; known: proven, conditional, none",
        ),
        ({"unit": "dog"}, "unknown unit 'dog'"),
        ({"relation": "swap"}, "unknown relation"),
        ({"trust": "anybody"}, "unknown trust"),
        ({"reason": "bounded\n\x1b[31mNOT PRIVATE"}, "reason must be one line of text"),
    ],
)
def test_a_guarantee_has_known_words(words, why):
    """A user's mechanism states it, and every output prints it."""
    with pytest.raises(ConfigError, match=why):
        Guarantee(**({"status": "proven", "reason": "bounded, then noised"} | words))


def test_rows_of_another_process_are_compared_as_well(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path, "run") as one, Ledger(path, "run") as other:
        one.charge(GAUSS, round=1, key="a", protects=CLIENT)
        other._db.execute("UPDATE charges SET protects = 'example, add-remove'")
        other.charge(GAUSS, round=2, key="b", protects="example, add-remove")
        with pytest.raises(LedgerError, match="protects"):
            one.charge(GAUSS, round=3, key="c", protects=CLIENT)
        assert one.position() == 2
