"""User-level privacy: all clients of one user together move a sum by at most the plan's bounds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Literal, get_type_hints

import pytest
import torch
from torch import nn

import simulations
from clients import ClientData
from clients.updates import LocalWork
from clients.users import UserWork
from fedlgm import Guarantee, LayerTable, LocalTraining, ReleasePlan, RunFacts, Sampling
from fedlgm.aggregation.client_release import Asked, client_release
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.noise.keys import KeyRing
from fedlgm.training import SequentialTrainer
from simulations.config import recipe as recipes
from simulations.config.user_level import UserLevel

USERS = ((0,), (1, 4, 5), (2, 3))
CLIP = [0.5, 0.25]
USER = (
    "privacy.unit=user",
    "federation.clients=12",
    "federation.rate=0.5",
    "federation.rounds=2",
    "privacy.delta=0.01",
    "privacy.accountant=rdp",
)


def bounded_sum(
    data: dict[int, ClientData], work: type[LocalWork], asked: list[int], **own: object
) -> torch.Tensor:
    torch.manual_seed(0)
    module, settings = (
        nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)),
        LocalTraining(lr=5.0, batch_size=2),
    )
    layers = LayerTable.from_module(module)
    facts = RunFacts(1.0, Sampling("poisson", len(USERS), 1.0, of="user"))
    plan = ReleasePlan(layers, CLIP, [1.0, 1.0], facts, Guarantee("proven", "bounded, then noised"))
    made = work(SequentialTrainer(module, layers, settings), settings, data.__getitem__, **own)
    contributions = made.contributions()
    block = contributions.empty(plan)
    for members, updates in contributions.updates(
        Asked(plan, layers.flatten(module), 1, asked), KeyRing.from_seed(3)
    ):
        block.skip(len(members)) if updates is None else block.add(updates)
    return (
        torch.stack([part.norm() for part in layers.split(block.total.double())]),
        block.total.double(),
        layers,
    )


def examples(kind: str, client: int) -> ClientData:
    generator = torch.Generator().manual_seed(client)
    count = 0 if kind == "empty" else 3
    x = torch.randn(count, 3, generator=generator) * {"usual": 1.0, "huge": 1e6}.get(kind, 1.0)
    y = (
        torch.full((count,), client % 2)
        if kind != "flipped"
        else torch.full((count,), 1 - client % 2)
    )
    return ClientData(torch.full_like(x, float("nan")) if kind == "nan" else x, y)


@pytest.mark.parametrize("user", range(len(USERS)))
def test_no_data_of_a_users_clients_move_the_sum_by_more_than_the_bounds(user: int) -> None:
    usual = {client: examples("usual", client) for client in range(6)}
    others = [number for number in range(len(USERS)) if number != user]
    _, without, layers = bounded_sum(usual, UserWork, others, users=USERS)
    farthest = torch.zeros(2, dtype=torch.float64)
    for kinds in product(("usual", "huge", "flipped", "empty", "nan"), repeat=len(USERS[user])):
        data = usual | {c: examples(kind, c) for c, kind in zip(USERS[user], kinds, strict=True)}
        _, total, _ = bounded_sum(data, UserWork, [0, 1, 2], users=USERS)
        moved = torch.stack([part.norm() for part in layers.split(total - without)])
        assert (moved <= torch.tensor(CLIP) * (1 + 1e-6)).all(), kinds
        farthest = torch.maximum(farthest, moved)
    assert farthest.tolist() == pytest.approx(
        CLIP, rel=1e-3
    )  # the bounds are reached, so the check sees something


def test_clients_that_are_bounded_one_by_one_move_it_by_more() -> None:
    data = {client: examples("usual", 1) for client in range(6)}
    norms, _, _ = bounded_sum(data, LocalWork, list(USERS[1]))
    assert (norms > 2.5 * torch.tensor(CLIP)).all()


@pytest.mark.parametrize(
    ("of", "work"), [("user", LocalWork), (None, partial(UserWork, users=USERS))]
)
def test_clients_are_not_bounded_in_the_place_of_users_or_the_reverse(
    of: str | None, work: Callable[..., LocalWork]
) -> None:
    """The release would be charged as one that protects the other unit."""
    module, settings = nn.Linear(3, 2), LocalTraining()
    layers = LayerTable.from_module(module)
    facts = RunFacts(1.0, Sampling("poisson", 3, 1.0, of=of))
    plan = ReleasePlan(layers, [1.0], [1.0], facts, Guarantee("proven", "bounded, then noised"))
    made = work(
        SequentialTrainer(module, layers, settings),
        settings,
        lambda client: examples("usual", client),
    )
    with pytest.raises(
        PrivacyError, match=r"the plan is for (users|clients), but these are contributions of"
    ):
        client_release(
            made.contributions(),
            None,
            Asked(plan, layers.flatten(module), 1, [0]),
        )


def test_a_users_contribution_is_the_mean_of_its_clients_updates() -> None:
    data = {client: examples("usual", client) for client in range(6)} | {5: examples("empty", 5)}
    module, settings = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), LocalTraining(lr=0.01)
    layers = LayerTable.from_module(module)
    plan = ReleasePlan(
        layers,
        CLIP,
        [1.0, 1.0],
        RunFacts(1.0, Sampling("poisson", 3, 1.0)),
        Guarantee("proven", "an example"),
    )
    asked = Asked(plan, layers.flatten(module), 1, [1, 2])
    trainer, order = SequentialTrainer(module, layers, settings), KeyRing.from_seed(1)
    users = UserWork(trainer, settings, data.__getitem__, users=USERS).contributions()
    clients = LocalWork(trainer, settings, data.__getitem__).contributions()
    own = {
        members[0]: updates[0].clone()
        for members, updates in clients.updates(asked._replace(clients=[1, 2, 3, 4]), order)
    }
    made = {members[0]: updates[0].clone() for members, updates in users.updates(asked, order)}
    assert torch.allclose(made[1], (own[1] + own[4]) / 2)  # client 5 has no data
    assert torch.allclose(made[2], (own[2] + own[3]) / 2)


def test_a_user_with_one_client_is_a_client(tmp_path) -> None:
    one = simulations.simulate(overrides=USER[1:], run_dir=tmp_path / "clients")
    user = simulations.simulate(
        overrides=[*USER, "federation.users=12"], run_dir=tmp_path / "users"
    )
    assert user["model_sha256"] == one["model_sha256"]
    assert user.epsilon == one.epsilon
    assert user.guarantee.startswith("proven (user-level, add-remove")


@pytest.mark.parametrize("users", [5, [0, 0, 0, 0, 0, 1, 1, 2, 3, 3, 4, 4]])
def test_it_costs_what_a_run_of_so_many_clients_costs_in_every_engine_and_block(
    users, tmp_path
) -> None:
    """`simulations/config/test_own_objects.py` has users on Ray and on Flower."""
    changes = [*USER, f"federation.users={users}"]
    runs = [
        simulations.simulate(overrides=changes, run_dir=tmp_path / engine, engine=engine, **options)
        for engine, options in (("local", {}), ("processes", {"workers": 2}))
    ]
    assert runs[0]["model_sha256"] == runs[1]["model_sha256"]
    five = simulations.simulate(
        overrides=[*USER[1:], "federation.clients=5"], run_dir=tmp_path / "five"
    )
    assert runs[0].epsilon == five.epsilon
    assert runs[0]["unit"] == "user"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (USER, "needs federation.users"),
        ((*USER[1:], "federation.users=4"), "federation.users is for privacy.unit = 'user'"),
        ((*USER, "federation.users=[0, 1]"), "names the user of each client: 2 for 12 clients"),
        (
            (*USER, f"federation.users={[0] * 11 + [2]}"),
            "numbered from 0, and each of them has a client",
        ),
        ((*USER, "federation.users=13"), "more than the 12 clients"),
        ((*USER, "federation.users=4", "privacy.trust=local"), "needs privacy.trust = 'central'"),
        ((*USER, "federation.users=4", "run.audit=true"), "canaries stand for clients"),
        (
            (*USER, "federation.users=4", "mechanism.name=dp-sgd"),
            "mechanism.name: dp-sgd bounds examples",
        ),
    ],
)
def test_what_does_not_go_with_users_is_refused_by_its_key(changes, message) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        recipes.load("digits", changes)


def test_real_nodes_refuse_it() -> None:
    recipe = recipes.load("digits", [*USER, "federation.users=4"])
    with pytest.raises(ConfigError, match="a real node sees only its own"):
        recipe.protects.check_nodes()


def test_what_is_drawn_is_the_unit_of_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A further unit of several clients would otherwise have run with guarantees for users."""
    recipe = recipes.load("digits", ["privacy.unit=user", "federation.users=100"])
    assert recipe.sampling.of == "user"
    monkeypatch.setattr(UserLevel, "of", "household")
    with pytest.raises(
        ConfigError, match="unknown unit of several clients 'household'; known: user"
    ):
        _ = recipe.sampling


class Household(UserLevel):
    """A further unit of several clients, as a project registers it."""

    verb, of = "bounds whole households", "household"


@pytest.mark.parametrize(
    "change",
    ["run.seed=1", "federation.users=4 privacy.trust=local", "federation.users=4 run.audit=true"],
)
def test_messages_name_a_further_unit(change, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(recipes.UNITS, "user", Household())
    with pytest.raises(ConfigError, match=r"privacy.unit = 'household'") as caught:
        recipes.load("digits", [*USER, *change.split()])
    assert "user'" not in str(caught.value)
    with pytest.raises(ConfigError, match="a household's updates are averaged"):
        Household().check_nodes()


def test_a_plan_for_a_further_unit_is_refused_under_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedlgm.planning.records.SharedUnit", Literal["user", "household"])
    monkeypatch.setattr(
        "fedlgm.privacy.guarantee.Unit", Literal["client", "example", "user", "household"]
    )
    monkeypatch.setattr("fedlgm.checks._hints_of", partial(get_type_hints, include_extras=True))
    facts = RunFacts(1.0, Sampling("poisson", 10, 0.5, of="household"))  # type: ignore[arg-type]
    layers, proven = LayerTable.from_sizes({"a": 2}), Guarantee("proven", "an example")
    with pytest.raises(PrivacyError, match=r"draws households .* leave of = 'household' out"):
        ReleasePlan(layers, [1.0], [1.0], facts, proven, bounded_by="trainer")
