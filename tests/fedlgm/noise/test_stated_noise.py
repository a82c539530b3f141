"""The noise has its stated law and scale in every layer and never comes back, whoever draws it;
wrong noise fails."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

import fedlgm.noise.draws
import fedlgm.noise.release
from fedlgm import mechanisms
from fedlgm.mechanisms.method import Method
from fedlgm.noise.integer_noise import DiscreteGaussian
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.noise.release import SERVER, release
from fedlgm.planning.distributed_trust import Shares
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm_lab.audits import Subject
from tests.support.noise_faults import faults
from tests.support.noise_plans import LAWS, SIGMA, plan

SIZES = (600, 40, 600)
ROUNDS = 6
Rows = list[list[np.ndarray]]


@pytest.mark.parametrize("family", LAWS)
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_releases_of_one_ring_differ_in_round_party_and_layer(family, backend):
    made, rows = plan(family, sizes={"a": 2_000, "b": 7, "c": 4_000, "d": 2_001}), []
    for round_, party in [(1, SERVER), (2, SERVER), (300, SERVER), (1, 0), (1, 1), (2, 0)]:
        flat = release(torch.zeros(made.size), made, KeyRing(0), round_, party, backend).double()
        rows.append(
            [
                part.numpy() / scale
                for part, scale in zip(made.layers.split(flat), SIGMA, strict=True)
            ]
        )
    assert faults(rows, family) == set()
    other = next(name for name in LAWS if name != family)
    assert "law" in faults(rows, other)


# -- noise of each kind of trust ---------------------------------------------------------------------------------------


def subject(name: str, trust: str) -> Subject:
    shares = Shares(20, 3) if trust == "distributed" else None
    relation = "add-remove" if trust == "central" else "replace-one"
    accountant = "pld" if shares is None else "rdp"
    facts = RunFacts(
        0.0, Sampling("poisson", 30, 1.0), relation, trust, 3, 1.0, 1e-5, accountant, shares=shares
    )  # fmt: skip
    mechanism, layers = mechanisms.get(name), LayerTable.from_sizes({"weight": 600, "bias": 5})
    return Subject(name, Method.calibrate(mechanism, mechanism.table(layers), facts))


def drawn(of: Subject, seed: int | None = 0) -> set[str]:
    """Faults of the noise that neighbouring sums get in several rounds, as in a run whose noise
    nobody can repeat."""
    keys, rows = KeyRing(KeyRing.from_seed(seed).root, secret=True), []
    worlds = next(iter(of.neighbours(of.start)))
    for round_ in range(1, ROUNDS + 1):
        for world in worlds:
            noise = (
                world.release(keys, round_).double() - world.total.double()
            ).numpy() / world.plan.scales
            rows.append(np.split(noise, np.cumsum([part.size for part in world.plan.parts])[:-1]))
    return faults(rows, worlds[0].plan.family)


CASES = [
    ("water-filling", "local"),
    ("laplace-iid", "local"),
    ("laplace-iid", "central"),
    ("uniform", "distributed"),
]


def of_one_round(draw: Callable[..., object]) -> Callable[..., object]:
    """The generators of round 1 in every round."""

    def drawn(self: KeyRing, purpose: Purpose, *path: int) -> object:
        return draw(self, purpose, *((1, *path[1:]) if purpose == Purpose.NOISE else path))

    return drawn


@pytest.mark.parametrize(("name", "trust"), CASES)
class TestEveryTrust:
    def test_noise_is_as_stated(self, name, trust):
        assert drawn(subject(name, trust)) == drawn(subject(name, trust), None) == set()

    def test_nine_tenths_of_the_noise_fail(self, name, trust, monkeypatch):
        add, draw = fedlgm.noise.draws.add_scaled_, DiscreteGaussian.draw
        monkeypatch.setattr(
            fedlgm.noise.draws, "add_scaled_", lambda piece, z, scale: add(piece, z, 0.9 * scale)
        )
        monkeypatch.setattr(
            DiscreteGaussian, "draw", lambda self, v, *rest: draw(self, int(0.81 * v), *rest)
        )
        assert "scale" in drawn(subject(name, trust))

    def test_noise_that_rounds_share_fails(self, name, trust, monkeypatch):
        for kind in ("torch_generator", "numpy_generator"):
            monkeypatch.setattr(KeyRing, kind, of_one_round(getattr(KeyRing, kind)))
        assert "repeated" in drawn(subject(name, trust))


@pytest.mark.parametrize(("name", "trust"), CASES[:3])
def test_noise_that_two_sums_share_fails(name, trust, monkeypatch):
    monkeypatch.setattr(fedlgm.noise.release, "_bind_keys", lambda keys, exact, plan: keys)
    assert "repeated" in drawn(subject(name, trust))


# -- power: the tests above would fail for these generators
# ------------------------------------------------------------


def sound(family: str = "gaussian") -> Rows:
    rng = np.random.default_rng(3)
    return [
        [LAWS[family].rvs(size=size, random_state=rng) for size in SIZES] for _ in range(ROUNDS)
    ]


def changed(
    number: int, change: Callable[[Rows, np.random.Generator], np.ndarray]
) -> Callable[[Rows], Rows]:
    """A layer of the last round becomes something else."""

    def wrong(rows: Rows) -> Rows:
        rows[-1][number] = change(rows, np.random.default_rng(4))
        return rows

    return wrong


def of_all(
    change: Callable[[np.ndarray, np.random.Generator], np.ndarray],
) -> Callable[[Rows], Rows]:
    """The last layer of every round becomes something else."""
    rng = np.random.default_rng(5)
    return lambda rows: [[*row[:-1], change(row[-1], rng)] for row in rows]


def mixed(rows: Rows) -> Rows:
    """The last round's numbers are those of the second in another order over all layers."""
    flat = np.random.default_rng(6).permutation(np.concatenate(rows[1]))
    return [*rows[:-1], np.split(flat, np.cumsum(SIZES)[:-1])]


def without_some(part: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.concatenate([np.zeros(3), part[3:]])


def cut_off(part: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    law = stats.truncnorm(-2.5, 2.5)
    return law.rvs(part.size, random_state=rng) / law.std()


WRONG = {
    "the noise of an earlier round": (changed(2, lambda rows, rng: rows[1][2]), "repeated"),
    "moved by 17 places": (changed(2, lambda rows, rng: np.roll(rows[1][2], 17)), "repeated"),
    "negated": (changed(2, lambda rows, rng: -rows[1][2]), "repeated"),
    "of another layer": (changed(2, lambda rows, rng: rows[1][0]), "repeated"),
    "of another layer in one round": (changed(2, lambda rows, rng: rows[-1][0]), "repeated"),
    "half of the variance": (
        changed(2, lambda rows, rng: (rows[-1][2] + rows[1][2]) / 2**0.5),
        "repeated",
    ),
    "in another order": (changed(2, lambda rows, rng: rng.permutation(rows[1][2])), "permuted"),
    "backwards": (changed(2, lambda rows, rng: rows[1][2][::-1]), "permuted"),
    "with other signs": (
        changed(1, lambda rows, rng: rows[1][1] * rng.choice([-1, 1], SIZES[1])),
        "permuted",
    ),
    "in another order over all layers": (mixed, "permuted"),
    "uniform": (of_all(lambda part, rng: rng.uniform(-(3**0.5), 3**0.5, part.size)), "law"),
    "Laplace": (of_all(lambda part, rng: rng.laplace(scale=0.5**0.5, size=part.size)), "law"),
    "cut off at 2.5": (of_all(cut_off), "law"),
    "0.9 of the scale": (of_all(lambda part, rng: 0.9 * part), "scale"),
    "1.1 of the scale": (of_all(lambda part, rng: 1.1 * part), "scale"),
    "three numbers without noise": (of_all(without_some), "bare"),
}


@pytest.mark.parametrize("family", LAWS)
def test_sound_numbers_have_no_fault(family):
    assert faults(sound(family), family) == set()


@pytest.mark.parametrize("name", WRONG)
def test_wrong_generators_fail(name):
    wrong, fault = WRONG[name]
    assert fault in faults(wrong(sound()))
