"""Rounds of secure aggregation in which nodes drop out anywhere: the sum is exact, or the round is
void."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedlgm import Guarantee, LayerTable, ReleasePlan, RunFacts, Sampling
from fedlgm.aggregation import BoundedSum
from fedlgm.noise.integer import centred, words
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import local_release
from fedlgm.planning.distributed_trust import Shares
from fedlgm_nodes.protocol.messages import sign
from fedlgm_nodes.secagg.cohort import Advert
from fedlgm_nodes.server.secagg import VoidRound
from tests.support.secagg import STEPS, Federation, aggregate, federation, terms


def random_rounds(count: int, seed: int) -> tuple[int, int]:
    """(exact, void) of that many rounds with random nodes, thresholds, drops and sizes."""
    rng, made, exact, void = np.random.default_rng(seed), dict[tuple[int, int], Federation](), 0, 0
    for number in range(count):
        nodes = int(rng.integers(2, 7))
        colluders = int(rng.integers(0, max(1, nodes - 2)))
        least = (nodes + colluders) // 2 + 1
        threshold = int(rng.integers(least, nodes + 1))
        if (nodes, colluders) not in made:
            made[nodes, colluders] = federation(nodes, colluders, seed=number)
        found = made[nodes, colluders]
        size = int(rng.choice([1, 2, 3, 7, 64]))
        for member in found.members:
            member.size = size
        agreed = terms(threshold, colluders, size, number)
        drops = {step: {c for c in range(nodes) if rng.random() < 0.06} for step in STEPS}
        away = {
            step: set().union(*(drops[s] for s in STEPS[: i + 1])) for i, step in enumerate(STEPS)
        }
        present = nodes - len(away["advertise"])
        possible = nodes - len(away["unmask"]) >= threshold and not agreed.problem(present)
        try:
            total, expected = aggregate(found, agreed, drops)
        except VoidRound:
            assert not possible, (nodes, threshold, drops)
            void += 1
        else:
            assert possible, (nodes, threshold, drops)
            np.testing.assert_array_equal(total, expected)
            exact += 1
    return exact, void


def test_the_sum_is_exact_or_the_round_is_void():
    exact, void = random_rounds(40, seed=1)
    assert exact > 10
    assert void > 5


@pytest.mark.slow
def test_the_sum_is_exact_or_the_round_is_void_in_many_rounds():
    exact, void = random_rounds(200, seed=2)
    assert exact > 60
    assert void > 40


@pytest.mark.slow
def test_more_than_two_hundred_nodes():
    nodes = federation(205, 2)
    agreed = terms(104, 2)
    drops = {"share": {0, 1}, "mask": set(range(5, 30)), "agree": {40}, "unmask": {41, 42}}
    np.testing.assert_array_equal(*aggregate(nodes, agreed, drops))
    assert agreed.problem(205) == ""
    assert "at most 1000 share secrets" in terms(600).problem(1001)


def test_dropped_nodes_are_charged_and_not_in_the_sum():
    nodes = federation(5, 1)
    total, expected = aggregate(nodes, terms(4, 1), {"agree": {4}})
    np.testing.assert_array_equal(total, expected)
    assert [len(member.charges) for member in nodes.members] == [1] * 5
    nodes = federation(5, 1)
    with pytest.raises(VoidRound, match="3 nodes sent a vector, 4 are needed"):
        aggregate(nodes, terms(4, 1), {"mask": {0, 1}})
    assert [len(member.charges) for member in nodes.members] == [
        0,
        0,
        1,
        1,
        1,
    ]  # what the void round has cost


def test_a_second_attempt_has_another_cohort_another_vector_and_another_charge():
    nodes = federation(4, 0)
    for number in range(2):
        aggregate(nodes, terms(3, number=number), {})
    for member in nodes.members:
        assert len(member.charges) == len(set(member.charges)) == 2
        first, second = member.vectors.values()
        assert (first != second).any()


@pytest.mark.parametrize(
    ("hostile", "keys"), [([1], ("00" * 32, "01" + "00" * 31)), ([1, 4], ("aa" * 32, "bb" * 32))]
)
def test_nodes_with_keys_that_nobody_can_use_are_left_out(hostile, keys):
    """Keys of small order, and one pair of keys for two colluding nodes: every honest node would
    refuse the cohort."""
    nodes, agreed = federation(6, 1, min_cohort=4), terms(4, 1)

    for client in hostile:
        signature = sign(nodes.signers[client], "secagg advert", agreed.digest, client, *keys)
        advert = Advert(client, *keys, signature)
        nodes.members[client].participant.advertise = lambda _, advert=advert: advert
    np.testing.assert_array_equal(*aggregate(nodes, agreed, {}))


@pytest.mark.parametrize("liar", range(5))
@pytest.mark.parametrize("threshold", [4, 5])
def test_wrong_shares_of_one_node_spoil_a_sum_only_where_all_are_needed(liar, threshold):
    """The server never takes a wrong sum for the sum, and finds the liar where the others' shares
    suffice."""
    nodes = federation(5, 0)
    unmask = nodes.members[liar].participant.unmask

    def wrong(attempt, signatures):
        return {
            client: share[:-2] + f"{int(share[-2:], 16) ^ 1:02x}"
            for client, share in unmask(attempt, signatures).items()
        }

    nodes.members[liar].participant.unmask = wrong
    lost = {}
    if threshold == 5:
        with pytest.raises(VoidRound, match="do not belong together"):
            aggregate(nodes, terms(threshold), {}, lost=lost)
    else:
        np.testing.assert_array_equal(*aggregate(nodes, terms(threshold), {}, lost=lost))
        assert list(lost) == ([liar] if liar < threshold else []), (
            "the shares of the first four are used first"
        )


def test_the_released_mean_is_that_of_a_simulation():
    """Masked words of real releases open to the mean that a simulation gets from the plain
    integers, bit by bit."""
    shares = Shares(4, 1)
    facts = RunFacts(
        2.0,
        Sampling("fixed", 5, 1.0),
        "replace-one",
        "distributed",
        accountant="rdp",
        shares=shares,
    )
    plan = ReleasePlan(
        LayerTable.from_sizes({"a": 30, "b": 12}),
        [1.0, 0.5],
        [6.0, 2.0],
        facts,
        Guarantee("proven", "t"),
    )
    keys, updates = (
        KeyRing.from_seed(1),
        torch.randn(5, 42, generator=torch.Generator().manual_seed(0)) / 50,
    )
    releases = [local_release(updates[c : c + 1], plan, keys, 1, c)[0] for c in range(5)]
    plain = BoundedSum.empty(plan)
    for own in releases:
        plain.merge(own, 1, 0)

    nodes = federation(5, 1, size=plan.size)
    for member, own in zip(nodes.members, releases, strict=True):
        member.make = lambda cohort, member=member, own=own: member.vectors.setdefault(
            cohort, words(own.numpy())
        )
    total, _ = aggregate(nodes, terms(shares.threshold, shares.colluders, plan.size), {})
    opened = BoundedSum.empty(plan)
    opened.merge(torch.from_numpy(centred(total).astype(np.float64)), 5, 0)
    assert torch.equal(plan.facts.noised_by.open_sum(opened), plan.facts.noised_by.open_sum(plain))
