"""Membership of clients: with all of their examples, or not at all."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedlgm_lab.attacks.runs import membership
from fedlgm_lab.attacks.runs.target import ClientPool, Images
from simulations.config.assembly import Assembly


@pytest.fixture
def recipe(tiny):
    return tiny(federation={"clients": 12, "rounds": 1})


def test_federations_train_on_whole_clients(recipe):
    pool = ClientPool.of_recipe(Images.of(Assembly(recipe).data.dataset), recipe)
    assert len(pool.trained) <= 24
    halves = pool.halves(4, seed=1)
    for members in halves:
        own = pool.federation(recipe, members)
        assert own.recipe.federation.clients == members.sum() == len(own.data.sizes)
        held = np.bincount(pool.unit_of, minlength=len(members))
        assert own.data.sizes.tolist() == held[members].tolist()
        assert len(own.data.dataset.train_y) + len(own.data.dataset.test_y) == len(pool.y)
        client = int(
            np.flatnonzero(members)[-1]
        )  # the same examples, under the number that it has there
        inside = own.data.dataset.train_x[own.data.partition[int(members.sum()) - 1]]
        assert np.array_equal(inside, pool.x[pool.unit_of == client])


def test_clients_of_a_run_are_its_own(recipe, tmp_path):
    assembly = Assembly(recipe)
    pool = ClientPool.of_run(Images.of(assembly.data.dataset), recipe, assembly.data.partition)
    first = int(np.flatnonzero(assembly.data.sizes)[0])
    assert np.array_equal(
        pool.x[pool.unit_of == 0], assembly.data.dataset.train_x[assembly.data.partition[first]]
    )
    held = np.bincount(pool.unit_of)
    assert held[pool.trained].sum() == len(assembly.data.dataset.train_y)
    assert held[~pool.trained].sum() == len(assembly.data.dataset.test_y)


def test_scores_of_a_client_are_means_over_its_examples(recipe):
    pool = ClientPool.of_recipe(Images.of(Assembly(recipe).data.dataset), recipe)
    values = np.random.default_rng(0).normal(size=(3, len(pool.y)))
    means = pool.by_unit(values)
    assert means.shape == (3, len(pool.trained))
    assert means[1, 4] == pytest.approx(values[1, pool.unit_of == 4].mean())
    assert pool.by_unit(values[1]).tolist() == means[1].tolist()


@pytest.mark.usefixtures("undrawn")
def test_attacks_on_clients_and_their_epsilon(run, tiny_file):
    overrides = [
        "--set",
        "federation.clients=10",
        "--set",
        "federation.rounds=1",
        "--set",
        "mechanism.name=none",
    ]
    status, out, err = run(
        "attack", "lira", tiny_file, "--shadows", 6, "--unit", "client", "--json", *overrides
    )
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert (report["unit"], report["epsilon_unit"]) == ("client", "client")
    assert set(report["results"]) == {"online", "offline", "rmia online", "rmia offline"}
    assert (
        50 < report["results"]["online"]["members"] <= 60
    )  # ten of twenty clients in each of six federations
    status, out, err = run("attack", "mia", tiny_file, "--unit", "client", *overrides)
    assert status == 0, err
    assert "(clients)" in out
    assert "the epsilon protects" not in out
    status, out, err = run("attack", "mia", tiny_file, "--examples", 100, *overrides)
    assert (
        "the epsilon protects clients, these figures are about examples; for figures about clients "
        "use --unit client" in " ".join(out.split())
    )


@pytest.mark.usefixtures("undrawn")
def test_a_run_is_attacked_by_its_own_clients(run, finished):
    status, out, err = run("attack", "lira", finished, "--shadows", 4, "--unit", "client", "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert report["results"]["online"]["members"] == 20
    assert report["epsilon"] <= 8.0


def test_a_unit_that_is_not_there(run, tiny_file):
    status, out, err = run("attack", "mia", tiny_file, "--unit", "server")
    assert (status, out) == (2, "")
    assert "known: example, client" in err


def test_the_best_attack_on_examples_says_less_than_one_on_clients():
    """What the figures are for: two clients' worth of overfitting shows in the client's mean before
    it does in one example."""
    rng = np.random.default_rng(0)
    examples, clients, of_each = 30 * 40, 40, 30
    unit_of = np.repeat(np.arange(clients), of_each)
    inside = np.stack([rng.permutation(clients) < 20 for _ in range(8)])
    inside = np.stack([inside, ~inside], axis=1).reshape(16, clients)
    scores = (
        2 * rng.standard_normal(examples)
        + 0.5 * inside[:, unit_of]
        + rng.standard_normal((16, examples))
    )
    pool = ClientPool(np.zeros((examples, 1)), np.zeros(examples), unit_of, inside[0], 2)
    alone = membership.pooled(scores, inside[:, unit_of], membership.likelihood_ratios)
    together = membership.pooled(pool.by_unit(scores), inside, membership.likelihood_ratios)
    assert together.auc > 0.9 > alone.auc
