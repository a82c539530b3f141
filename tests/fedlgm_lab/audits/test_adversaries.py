"""Audits of noise in shares for each of its adversaries: sound noise passes, too little or that of
too few fails."""

from __future__ import annotations

import dataclasses

import pytest

from fedlgm import mechanisms
from fedlgm.mechanisms.method import Method
from fedlgm.noise.integer_noise import DiscreteGaussian
from fedlgm.planning.distributed_trust import NoisedInShares, Shares
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm_lab.audits import Audit, Subject

LAYERS = LayerTable.from_sizes({"weight": 4000, "bias": 100})


def subject(noise: str = "discrete-gaussian", rate: float = 1.0, **options: int) -> Subject:
    """Thirty nodes, of which twenty must answer and three may be the server's."""
    clients = round(30 / rate)
    facts = RunFacts(
        0.0, Sampling("fixed", clients, rate), "replace-one", "distributed", 20, 8.0, 1e-5, "rdp",
        shares=Shares(20, 3, noise), **options,
    )  # fmt: skip
    mechanism = mechanisms.get("uniform", bound=0.5)
    return Subject(
        "shares", Method(mechanism, LAYERS, facts.with_multiplier(mechanism.calibrate(facts)))
    )


@pytest.mark.parametrize("noise", ["discrete-gaussian", "skellam"])
def test_each_adversary_has_a_bound_below_its_epsilon(noise: str) -> None:
    found = Audit("probe").mechanism(subject(noise))
    server, readers = found.adversaries
    assert found.passed
    assert (server.nodes, readers.nodes) == (17, 20)
    assert (
        server.epsilon_reported
        == pytest.approx(found.epsilon_reported, rel=1e-6)
        == pytest.approx(8.0, rel=1e-4)
    )
    for row in found.adversaries:
        assert 0.88 * row.epsilon_reported < row.epsilon_lower < row.epsilon_reported
    assert readers.epsilon_lower < 0.95 * server.epsilon_lower
    assert [row["adversary"] for row in found.to_dict()["adversaries"]] == ["the server", "readers"]


def test_the_probe_is_what_a_run_with_shares_gets_without_a_choice() -> None:
    found = Audit(seed=1).mechanism(subject())
    assert found.method == "probe"
    assert len(found.adversaries) == 2


def test_sampling_and_a_cap_count_as_reported() -> None:
    found = Audit("probe").mechanism(subject(rate=0.5, max_participations=12))
    assert found.passed
    assert found.epsilon_reported == pytest.approx(8.0, rel=1e-4)
    amplified = Audit("probe").mechanism(subject(rate=0.1)).adversaries[1]
    assert (
        0.8 * amplified.epsilon_reported < amplified.epsilon_lower < amplified.epsilon_reported < 4
    )


@pytest.mark.parametrize("share", [0.75, 0.5, 0.01])
def test_too_little_noise_of_each_node_is_caught(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = DiscreteGaussian.draw
    monkeypatch.setattr(
        DiscreteGaussian,
        "draw",
        lambda self, variance, *rest: draw(self, int(share * variance), *rest),
    )
    found = Audit("probe").mechanism(subject())
    assert not found.passed
    assert all(row.epsilon_lower > row.epsilon_reported for row in found.adversaries)


def test_readers_that_are_told_of_more_nodes_than_must_answer_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A round may have the noise of twenty nodes only, not of all thirty."""

    def of_all(self: NoisedInShares, facts: RunFacts, rounds: int) -> float:
        return right(
            self,
            dataclasses.replace(facts, noise_multiplier=facts.noise_multiplier * 1.5**0.5),
            rounds,
        )

    right = NoisedInShares.readers_epsilon
    monkeypatch.setattr(NoisedInShares, "readers_epsilon", of_all)
    found = Audit("probe").mechanism(subject())
    assert (found.passed, found.exceeded) == (False, True)
    assert found.adversaries[1].epsilon_lower > found.adversaries[1].epsilon_reported


def test_other_runs_have_a_single_adversary() -> None:
    assert Audit("probe").mechanism(Subject.of("snr-consistent")).adversaries == ()


@pytest.mark.parametrize(("trust", "shares"), [("local", None), ("distributed", Shares(20, 3))])
def test_what_is_reported_is_the_cost_of_the_releases_that_a_cap_allows(
    trust: str, shares: Shares | None
) -> None:
    """An audit against the cost of all rounds would pass a leak beyond the run's own epsilon."""
    facts = RunFacts(
        0.0,
        Sampling("fixed", 60, 0.5),
        "replace-one",
        trust,
        40,
        8.0,
        1e-5,
        "rdp",
        max_participations=10,
        shares=shares,
    )
    mechanism = mechanisms.get("uniform", bound=0.5)
    capped = Subject(
        "capped", Method(mechanism, LAYERS, facts.with_multiplier(mechanism.calibrate(facts)))
    )
    found = Audit("probe").mechanism(capped)
    assert found.epsilon_reported == pytest.approx(8.0, rel=1e-4)
    assert found.passed
