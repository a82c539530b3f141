"""Clients of a Flower app that plan their own releases: LaDP-FL as published, and in a sound form."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict

from clients import PrivateClientApp
from clients.choice import planner_of
from clients.consent import Consent
from fedlgm import LocalTraining, Method, RunFacts, Sampling, mechanisms, wire
from fedlgm.aggregation.client_release import Asked, WholeUpdates
from fedlgm.errors import ConfigError, Notice, PrivacyError
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.ledger import Ledger
from simulations.config.assembly import Assembly
from simulations.engines.grid import WorkerGrid
from strategies import PrivateFedAvg

LAYERS = LayerTable.from_sizes({"a": 4, "b": 3, "c": 2, "d": 1})
FACTS = RunFacts(2.0, Sampling("poisson", 10, 1.0), "replace-one", "local", rounds=3)
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "client_side_ladp" / "app.py"


class Given(WholeUpdates):
    def __init__(self, mechanism: Any) -> None:
        super().__init__()
        self.planner = planner_of(mechanism)

    def updates(self, asked: Asked, order: KeyRing) -> Iterator[Any]:
        raise NotImplementedError


class Nodes(WorkerGrid):
    """Ten nodes in this process."""

    def __init__(self, app: Any) -> None:
        super().__init__(workers=10)
        self._app = app
        self.contexts = {
            node: Context(1, node, {"partition-id": i, "num-partitions": 10}, RecordDict(), {})
            for i, node in enumerate(self.get_node_ids())
        }

    def deliver(self, messages: list[Message]) -> Iterator[Message]:
        for message in messages:
            yield self._app(message, self.contexts[message.metadata.dst_node_id])


def asked(mechanism: Any, facts: RunFacts = FACTS) -> Asked:
    return Asked(mechanism.plan(LAYERS, facts, Transcript(0, ())), torch.zeros(LAYERS.size), 1, [0])


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_the_answer_and_the_layers_cost_the_rounds_plan_whatever_the_answer_is(share) -> None:
    mechanism = mechanisms.get("client-ladp", share=share)
    common = asked(mechanism).plan
    (noisy,) = common.queries
    assert common.effective_multiplier == pytest.approx(FACTS.noise_multiplier)
    rng = np.random.default_rng(0)
    answers = [rng.normal(0, 9, 4) for _ in range(50)] + [np.zeros(4), -np.ones(4), np.eye(4)[0]]
    chosen = set()
    for answer in answers:
        own = mechanism.plan_from_answer(common, answer)
        cost = own.effective_multiplier**-2 + (noisy.query.bound / noisy.sigma) ** 2
        assert cost == pytest.approx(common.effective_multiplier**-2)
        assert own.protected
        assert own.released.sum() == 2
        assert math.hypot(*own.clip) == pytest.approx(1.0)
        chosen.add(tuple(own.released))
    assert len(chosen) == 6  # of two among four layers


def test_layers_that_a_client_does_not_select_do_not_leave_it() -> None:
    mechanism = mechanisms.get("client-ladp")
    request = asked(mechanism, replace(FACTS, noise_multiplier=1e-6))
    update = torch.tensor([[0.0] * 4 + [0.1] * 3 + [0.2] * 2 + [0.0]])
    made = Given(mechanism).release(0, update, request, KeyRing.from_seed(1))
    assert made.total.shape == (LAYERS.size + 4,)
    assert made.total[:4].tolist() == [0.0] * 4
    assert made.total[9].tolist() == 0.0
    assert torch.allclose(made.total[4:9].float(), update[0, 4:9], atol=1e-4)
    strengths = LAYERS.norms(update[0]) / update.norm()
    assert torch.allclose(made.total[LAYERS.size :].float(), strengths.float(), atol=1e-4)


def test_equal_updates_are_the_same_release_and_others_have_other_noise() -> None:
    """Beyond the bounds of the first step two updates may have the same answer: the name of the
    release still differs, so that it is charged."""
    mechanism = mechanisms.get("client-ladp", keep=0.25)  # own bound 1, the first step's is 1 / 2
    request = asked(mechanism, replace(FACTS, noise_multiplier=1e-3))
    clients, keys = Given(mechanism), KeyRing.from_seed(1)
    update = torch.zeros(1, LAYERS.size)
    update[0, 0] = 0.625
    first, again, other = (
        clients.release(0, rows, request, keys) for rows in (update, update.clone(), update * 2)
    )
    assert (first.name, first.total.tolist()) == (again.name, again.total.tolist())
    assert first.name != other.name
    assert torch.equal(first.total[LAYERS.size :], other.total[LAYERS.size :])
    assert not torch.allclose(first.total[1:4], other.total[1:4])
    nobody = clients.release(0, None, request, keys)
    assert nobody.total.isfinite().all()


def test_a_plan_that_costs_more_than_the_round_is_refused() -> None:
    class Greedy(type(mechanisms.get("client-ladp"))):  # type: ignore[misc]
        def plan_from_answer(self, plan: ReleasePlan, answer: np.ndarray) -> ReleasePlan:
            return replace(super().plan_from_answer(plan, answer), sigma=np.full(4, 0.5))

    greedy = Greedy("greedy", keep=1.0)
    with pytest.raises(PrivacyError, match="cost more than the round's plan"):
        Given(greedy).release(0, torch.ones(1, LAYERS.size), asked(greedy), KeyRing.from_seed(1))


def test_the_server_cannot_choose_for_a_client() -> None:
    facts = replace(FACTS, trust="central", relation="add-remove")
    with pytest.raises(ConfigError, match=r"set privacy\.trust = 'local'"):
        asked(mechanisms.get("client-ladp"), facts)


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_runs_and_every_release_is_charged(tmp_path: Path) -> None:
    app = example("client_side_ladp")
    grid = Nodes(app.client)
    app.main(grid, Context(1, 1, {}, RecordDict(), {"folder": str(tmp_path)}))
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert 7 < ledger.epsilon(1e-2) <= 8.001
    for node in grid.contexts.values():
        (releases,) = (value for key, value in node.state[wire.RELEASES].items() if "keys" in key)
        assert len(set(releases)) == 3


def test_the_published_variant_runs_in_an_app(tmp_path: Path) -> None:
    """A layer below the threshold leaves the client as it is, as the paper has it."""
    model, training = torch.nn.Linear(3, 2), LocalTraining(lr=0.1, epochs=1, gradient_clip=1.0)
    budget = {"epsilon": 0.5, "delta": 1e-2, "rounds": 1}
    facts = RunFacts(
        0.0, Sampling("poisson", 10, 1.0), "replace-one", "local", training=training, **budget
    )
    mechanism = mechanisms.get("ladp", variant="published", threshold=1e3)
    consent = Consent(Method.of(model, mechanism, facts).facts, protected=False)
    app = PrivateClientApp(model, mechanism=mechanism, consent=consent)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        state = {
            name: value + 1
            for name, value in message.content["arrays"].to_torch_state_dict().items()
        }
        return Message(RecordDict({"arrays": ArrayRecord(state)}), reply_to=message)

    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = PrivateFedAvg(
        model, mechanism=mechanism, trust="local", training=training, clients=10,
        ledger=tmp_path / "ledger.sqlite", **budget,
    )  # fmt: skip
    after = made.start(Nodes(app)).arrays.to_torch_state_dict()
    assert all(torch.allclose(after[name], before[name] + 1, atol=1e-5) for name in before)
    assert made.epsilon() == math.inf


def test_an_app_that_states_no_training_is_told_how_to(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"PrivateFedAvg\(training=fedlgm.LocalTraining"):
        PrivateFedAvg(
            torch.nn.Linear(3, 2), mechanism="ladp:published", trust="local", epsilon=1, delta=1e-2,
            clients=10, rounds=1, ledger=tmp_path / "ledger.sqlite",
        )  # fmt: skip
    with pytest.raises(ConfigError, match="training must be"):
        PrivateFedAvg(
            torch.nn.Linear(3, 2), training={"lr": 1}, epsilon=1, delta=1e-2, clients=10, rounds=1,
            ledger=tmp_path / "ledger.sqlite",
        )  # fmt: skip


def test_a_run_says_whose_noise_its_rounds_report(tiny) -> None:
    recipe = tiny(
        mechanism={"name": "client-ladp"},
        federation={"rate": 1.0},
        privacy={"trust": "local", "max_participations": 2},
    )
    with pytest.warns(Notice, match="each client spreads its own noise"):
        Assembly(recipe).check()
