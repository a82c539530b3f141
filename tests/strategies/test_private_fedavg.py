"""What is wrong with the arguments of a strategy for an existing app is said before its ledger
exists."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod, message_size_mod
from flwr.server import Server, SimpleClientManager
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
from torch import nn

from clients import AnyClient, PrivateClientApp
from clients.consent import Consent
from clients.layerwise import place_reply
from fedlgm import mechanisms, wire
from fedlgm.errors import ConfigError, DivergedError, LedgerError, Notice, RunError
from fedlgm.privacy import attack_rates
from simulations.engines.local import LocalGrid
from strategies import AnyNode, CohortSampler, OneNodePerClient, PrivateFedAvg, ServerOptimizer


def strategy(ledger: Path, model: Any = None, **options: Any) -> PrivateFedAvg:
    """A strategy over ten clients."""
    model = nn.Linear(3, 2) if model is None else model
    options = {"epsilon": 8, "delta": 1e-5, "clients": 10, "rounds": 3} | options
    return PrivateFedAvg(model, ledger=ledger, **options)


class Step:
    """A step of one's own that adds the mean."""

    def step(self, model, mean_update):
        return model + mean_update


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": 3}, "a model must be an nn.Module, got int"),
        ({"model": nn.Linear}, "a model must be an nn.Module, got the class Linear"),
        ({"mechanism": 3}, "a mechanism must be an object .*; got int"),
        (
            {"mechanism": type(mechanisms.get("uniform"))},
            "a mechanism must be an object .*; got the class",
        ),
        ({"optimizer": object()}, "server optimizer '<object>' has no step"),
        (
            {"optimizer": "adamm"},
            "unknown server optimizer 'adamm'; did you mean 'adam'",
        ),
        ({"optimizer": Step(), "server_lr": 0.1}, "server_lr is the rate of a named optimizer"),
        ({"fraction_train": 0.5}, "no argument 'fraction_train': rate is the probability"),
        ({"min_available_nodes": 2}, "no argument 'min_available_nodes': clients is the number"),
        (
            {"evaluate_metrics_aggr_fn": max},
            r"evaluate on the server with start\(evaluate_fn=\.\.\.\)",
        ),
        ({"proximal_mu": 0.1}, "add it to the loss under @app.train"),
        ({"eta": 0.1}, "server_lr is the rate"),
        ({"ratio": 0.1}, "no argument 'ratio': its arguments are in docs/how-to/flower-app.md"),
        ({"server_lr": 0.0}, "server_lr must be a positive number, got 0.0"),
        ({"server_lr": "fast"}, "server_lr must be a positive number, got 'fast'"),
        ({"rounds": 2.5}, "the number of rounds must be a whole number of at least 1, got 2.5"),
        ({"rounds": 0}, "the number of rounds must be a whole number of at least 1, got 0"),
        ({"rounds": True}, "the number of rounds must be a whole number of at least 1, got True"),
    ],
)
def test_what_cannot_be_used_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        strategy(tmp_path / "ledger.sqlite", **options)
    assert not (tmp_path / "ledger.sqlite").exists()


class Twice:
    """A step of one's own."""

    def step(self, model, mean_update):
        return model + 2 * mean_update


@pytest.mark.parametrize("optimizer", [None, "momentum", ServerOptimizer("adam", 0.1), Twice()])
def test_optimizers_by_name_and_object(optimizer: Any, tmp_path: Path) -> None:
    made = strategy(tmp_path / "ledger.sqlite", optimizer=optimizer)
    zero, mean = torch.zeros(8), torch.ones(8)
    moved = made.optimizer.step(zero, mean)
    assert moved.shape == (8,)
    assert bool((moved > 0).all())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"grid": None},
            r"grid must be the first argument of the function under @app.main\(\), got NoneType",
        ),
        (
            {"initial_arrays": nn.Linear(3, 2).state_dict()},
            "initial_arrays must be an ArrayRecord, got OrderedDict",
        ),
        ({"train_config": {"lr": 0.1}}, "train_config must be a ConfigRecord, such as .* got dict"),
        (
            {"evaluate_fn": lambda arrays: None},
            r"evaluate_fn is called with \(round, arrays\): too many positional arguments",
        ),
        (
            {"evaluate_fn": "accuracy"},
            r"evaluate_fn must be a function \(round, arrays\), got 'accuracy'",
        ),
    ],
)
def test_arguments_of_start_are_checked_before_the_first_round(
    given: Any, message: str, tmp_path: Path
) -> None:
    made = strategy(tmp_path / "ledger.sqlite")
    with pytest.raises(ConfigError, match=message):
        made.start(**{"grid": SimpleNamespace(send_and_receive=list)} | given)
    assert made.transcript.rounds == 0


def test_two_strategies_share_no_state_of_one_optimizer(tmp_path: Path) -> None:
    given = ServerOptimizer("momentum", 1.0)
    first, second = (
        strategy(tmp_path / f"{name}.sqlite", optimizer=given) for name in ("first", "second")
    )
    zero, mean = torch.zeros(8), torch.ones(8)
    first.optimizer.step(zero, mean)
    assert torch.equal(second.optimizer.step(zero, mean), mean)


@pytest.mark.parametrize(
    ("options", "moves"),
    [
        ({}, 1.0),
        ({"optimizer": "adam"}, 0.01),
        ({"optimizer": "adam", "server_lr": 0.1}, 0.1),
        ({"optimizer": "yogi", "server_lr": 0.1}, 0.099),
        ({"server_lr": 0.5}, 0.5),
    ],
)
def test_a_named_optimizer_has_a_rate_that_fits_it(
    options: dict[str, Any], moves: float, tmp_path: Path
) -> None:
    made = strategy(tmp_path / "ledger.sqlite", **options)
    torch.testing.assert_close(
        made.optimizer.step(torch.zeros(8), torch.ones(8)),
        torch.full((8,), moves),
        rtol=2e-3,
        atol=0,
    )


def test_the_server_evaluates_what_the_model_loads(tmp_path: Path) -> None:
    """Before the first round and after each one, with frozen parameters and buffers, as Flower's
    strategies give it."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    model.register_buffer("mask", torch.ones(2))
    made = strategy(
        tmp_path / "ledger.sqlite", model, optimizer=Step(), rate=1e-7
    )  # nobody takes part
    made.nodes = AnyNode(np.ones(10))
    app = ClientApp()
    app.query()(lambda message, context: place_reply(message, AnyClient()))
    seen: list[tuple[int, float]] = []

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        found = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        found.register_buffer("mask", torch.zeros(2))
        found.load_state_dict(arrays.to_torch_state_dict())
        assert torch.equal(found[0].weight, model[0].weight)
        seen.append((round, found[1].bias[0].item()))
        return MetricRecord({"bias": seen[-1][1]})

    result = made.start(LocalGrid(app), evaluate_fn=evaluate)
    assert [round for round, _ in seen] == [0, 1, 2, 3]
    assert len({bias for _, bias in seen}) == 4  # each round's own model
    assert (
        result.evaluate_metrics_serverapp[3]["bias"]
        == seen[-1][1]
        == float(made.state_dict()["1.bias"][0])
    )


class Overflows:
    """A step whose second model is infinite."""

    def __init__(self) -> None:
        self.made = 0

    def step(self, model, mean_update):
        self.made += 1
        return model + 1 if self.made == 1 else model * float("inf")


def test_a_model_that_is_not_finite_ends_training_and_the_one_before_it_stays(
    tmp_path: Path,
) -> None:
    made = strategy(
        tmp_path / "ledger.sqlite", optimizer=Overflows(), rate=1e-7
    )  # nobody takes part
    made.nodes = AnyNode(np.ones(10))
    app = ClientApp()
    app.query()(lambda message, context: place_reply(message, AnyClient()))
    before = made.state_dict()
    with pytest.raises(
        DivergedError, match=r"^training diverged in round 2: .* 8 of the model's 8 values"
    ):
        made.start(LocalGrid(app))
    assert made.transcript.rounds == 1
    for name, value in made.state_dict().items():
        torch.testing.assert_close(value, before[name] + 1)
    assert made.releaser.ledger.rounds() == 2


def test_no_rounds_are_no_rounds(tmp_path: Path) -> None:
    """A grid that cannot be asked anything is enough for none."""
    made = strategy(tmp_path / "ledger.sqlite")
    assert made.start(None, num_rounds=0).arrays.keys() == {"weight", "bias"}  # type: ignore[arg-type]
    assert (made.transcript.rounds, made.epsilon()) == (0, 0.0)
    with pytest.raises(
        ConfigError, match="num_rounds must be a whole number of at least 0, got -1"
    ):
        made.start(None, num_rounds=-1)  # type: ignore[arg-type]


def test_more_rounds_than_the_noise_covers_are_said(tmp_path: Path) -> None:
    made = strategy(tmp_path / "ledger.sqlite")
    made.transcript = dataclasses.replace(made.transcript, rounds=made.method.facts.rounds)
    with pytest.warns(
        Notice, match="num_rounds = 99 is ignored: the noise is calibrated to rounds = "
    ):
        made.start(None, num_rounds=99)  # type: ignore[arg-type]


def test_the_result_fits_the_model(tmp_path: Path) -> None:
    """Frozen parameters and buffers are a part of what a model loads, though nobody trains or sends
    them."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    model.register_buffer("mask", torch.ones(2))
    result = strategy(tmp_path / "ledger.sqlite", model).start(None, num_rounds=0)  # type: ignore[arg-type]
    found = result.arrays.to_torch_state_dict()
    assert list(found) == list(model.state_dict())
    model.load_state_dict(found)
    assert torch.equal(found["0.weight"], model[0].weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delta": 0.1}, "delta = 0.1 is not below 1/10"),
        (
            {"model": nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))},
            "running statistics .* GroupNorm",
        ),
    ],
)
def test_what_works_and_is_not_meant_is_said(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.warns(Notice, match=message):
        strategy(tmp_path / "ledger.sqlite", **options)


@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test_a_mean_update_moves_the_model_by_itself_in_the_end(tmp_path, name):
    """With a rate of 1 momentum moves it ten times as far, noise included."""
    step = strategy(tmp_path / "ledger.sqlite", optimizer=name).optimizer
    model = step.step(torch.zeros(2), torch.tensor([1.0, -2.0]))
    for _ in range(200):
        model = step.step(model, torch.zeros(2))
    torch.testing.assert_close(model, torch.tensor([1.0, -2.0]), rtol=1e-5, atol=0)


def test_other_initial_weights_are_noticed(tmp_path):
    """An app that starts from a pretrained model passes its weights here, and trained random ones
    without a word."""
    model = nn.Linear(3, 2)
    for arrays in (ArrayRecord(model.state_dict()), None):
        made = strategy(tmp_path / "ledger.sqlite", model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            made.start(None, arrays if arrays is not None else made.initial_arrays(), num_rounds=0)
    with pytest.warns(Notice, match="initial_arrays differ from the weights"):
        strategy(tmp_path / "ledger.sqlite", model).start(
            None, ArrayRecord(nn.Linear(3, 2).state_dict()), num_rounds=0
        )


class TwoNodes(LocalGrid):
    """Nodes 2 and 3, each with its app and its state."""

    def __init__(self, apps: list[ClientApp]) -> None:
        super().__init__(apps[0])
        self._node_ids, self._apps = [2, 3], apps
        places = ({wire.PARTITION: number, wire.PARTITIONS: 2} for number in range(2))
        self.contexts = [
            Context(1, 2 + number, place, RecordDict(), {}) for number, place in enumerate(places)
        ]

    def deliver(self, messages: list[Message]) -> Iterator[Message]:
        for message in messages:
            number = message.metadata.dst_node_id - 2
            yield self._apps[number](message, self.contexts[number])


def test_a_round_under_local_trust_that_is_made_again_is_charged_again(tmp_path: Path) -> None:
    """An app trains otherwise the second time, so the nodes that answered the first time release
    twice."""
    made = strategy(
        tmp_path / "ledger.sqlite", clients=2, rounds=2, delta=0.1, trust="local",
        nodes=OneNodePerClient(wait=0.1, max_failures=0),
    )  # fmt: skip
    asked = [0, 0]

    def app(number: int) -> ClientApp:
        consent = Consent(dataclasses.replace(made.method.facts, rounds=9), allowance=9.0)
        found = PrivateClientApp(nn.Linear(3, 2), consent=consent)

        @found.train()
        def train(message: Message, context: Context) -> Message:
            asked[number] += 1
            if number == 1 and asked[number] == 1:
                raise ValueError
            state = message.content["arrays"].to_torch_state_dict()
            arrays = {name: value + asked[number] for name, value in state.items()}
            return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=message)

        return found

    grid = TwoNodes([app(0), app(1)])
    with pytest.raises(RunError, match=r"more than federation\.max_failures = 0 nodes failed"):
        made.start(grid)
    made.start(grid)
    releases = [
        len(context.state[wire.RELEASES][f"{n}.keys"]) for n, context in enumerate(grid.contexts)
    ]
    assert (asked, releases) == ([3, 3], [3, 2])
    assert made.releaser.ledger.participations()[0] == 3
    assert made.epsilon() > 8


def test_a_mechanism_may_be_named_with_its_variant(tmp_path):
    """It was taken for a module named "ladp"."""
    arguments = {
        "epsilon": 8.0,
        "delta": 0.01,
        "clients": 20,
        "rounds": 1,
        "ledger": tmp_path / "ledger.sqlite",
    }
    made = PrivateFedAvg(torch.nn.Linear(5, 2), mechanism="snr-consistent:sound", **arguments)
    assert made.method.mechanism.variant == "sound"
    with pytest.raises(ConfigError, match="in the paper's frame the clients add the noise"):
        PrivateFedAvg(torch.nn.Linear(5, 2), mechanism="ladp:published", **arguments)


class Nobody(CohortSampler):
    """Draws nobody: rounds release only noise, and are charged."""

    def cohort(self, round: int, exclude: frozenset[int] = frozenset()) -> np.ndarray:
        return np.array([], dtype=np.int64)


def alone(ledger: Path, **options: Any) -> PrivateFedAvg:
    """A strategy whose rounds nobody takes part in."""
    made = strategy(ledger, **options)
    made.nodes, made.sampler = (
        AnyNode(np.ones(10)),
        Nobody(made.sampler.sampling, made.sampler.keys),
    )
    return made


def answering() -> LocalGrid:
    app = ClientApp()
    app.query()(lambda message, context: place_reply(message, AnyClient()))
    return LocalGrid(app)


def test_a_second_run_on_a_ledger_is_refused_unless_it_is_meant(
    tmp_path: Path, capsys: Any
) -> None:
    """An app that is started twice trains from scratch: both runs count for the clients."""
    path = tmp_path / "ledger.sqlite"
    first = alone(path)
    first.start(answering())
    words = rf"^{path} already holds 3 rounds \(epsilon [\d.]+\); this run would bring it to [\d.]+, above 8: name"
    with pytest.raises(LedgerError, match=words):
        alone(path, epsilon=8)
    assert first.releaser.ledger.position() == 3
    again = alone(path, continue_ledger=True)
    again.start(answering(), num_rounds=1)
    assert again.epsilon() > first.releaser.ledger.epsilon(1e-5, through=0, abandoned=3)
    again.start(answering())
    assert again.releaser.ledger.position() == 6
    assert [
        line.startswith("fedlgm: epsilon ") for line in capsys.readouterr().out.splitlines()
    ] == [True] * 3


def test_the_ledger_is_looked_at_again_before_the_first_round(tmp_path: Path) -> None:
    one, other = (alone(tmp_path / "ledger.sqlite") for _ in range(2))
    one.start(answering(), num_rounds=1)
    with pytest.raises(LedgerError, match="already holds 1 round "):
        other.start(answering())
    one.start(answering())
    assert one.releaser.ledger.position() == 3


def test_runs_at_the_same_time_are_refused(tmp_path: Path) -> None:
    """The second run begins after the first was checked and before it has charged anything."""
    path = tmp_path / "ledger.sqlite"
    one, other = alone(path), alone(path, continue_ledger=True)
    words = f"^another run is charging the ledger {path}: wait until it ends"

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        with pytest.raises(LedgerError, match=words):
            other.start(answering(), num_rounds=1)
        return MetricRecord()

    one.start(answering(), num_rounds=2, evaluate_fn=evaluate)
    assert one.releaser.ledger.position() == 2
    other.start(answering(), num_rounds=1)
    assert one.releaser.ledger.position() == 3


def test_a_round_of_a_subclass_start_holds_the_ledger(tmp_path: Path) -> None:
    """Its rounds do not pass through `PrivateFedAvg.start`."""
    path, grid = tmp_path / "ledger.sqlite", answering()
    one, stale, other = alone(path), alone(path), alone(path, continue_ledger=True)
    replies = grid.send_and_receive(
        one.configure_train(1, one.initial_arrays(), ConfigRecord(), grid)
    )
    for refused in (other, stale):
        with pytest.raises(LedgerError, match="another run is charging the ledger"):
            refused.configure_train(1, refused.initial_arrays(), ConfigRecord(), grid)
    one.aggregate_train(1, replies)
    with pytest.raises(LedgerError, match="already holds 1 round "):
        stale.configure_train(1, stale.initial_arrays(), ConfigRecord(), grid)
    one.configure_train(2, one.initial_arrays(), ConfigRecord(), grid)
    with pytest.raises(ValueError, match="a mistake"):
        one.aggregate_train(2, iter_raises())
    other.start(grid, num_rounds=1)
    assert one.releaser.ledger.position() == 2


def iter_raises() -> Iterator[Message]:
    raise ValueError("a mistake")
    yield


def test_a_run_that_ends_early_resumes_within_its_budget(tmp_path: Path) -> None:
    """What the pages say: the saved weights, the same settings, and the rounds that are left."""
    path, full = tmp_path / "ledger.sqlite", {"rounds": 3, "epsilon": 8}
    alone(path, **full).start(answering(), num_rounds=2)
    resumed = alone(path, **full, continue_ledger=True)
    resumed.start(answering(), num_rounds=1)
    assert resumed.epsilon() <= 8


def test_start_ends_with_the_cost_in_one_line(tmp_path: Path, capsys: Any) -> None:
    made = alone(tmp_path / "ledger.sqlite", epsilon=4)
    made.start(answering(), num_rounds=2)
    (line,) = capsys.readouterr().out.splitlines()
    head = made.releaser.ledger.head()
    assert line == (
        f"fedlgm: epsilon {made.epsilon():.4g} at delta 1e-05: "
        f"{attack_rates(made.releaser.ledger).sentence('clients')}; guarantee: {made.guarantee()}; "
        f"ledger head {head}"
    )
    made.start(answering())
    extra = alone(tmp_path / "ledger.sqlite", epsilon=4, continue_ledger=True)
    extra.start(answering(), num_rounds=1)
    assert "(above the budget of 4) at delta" in capsys.readouterr().out.splitlines()[-1]


class FailsLater(PrivateFedAvg):
    """A strategy of a user's own that fails in its second round."""

    def aggregate_train(self, server_round, replies):
        if server_round == 2:
            raise ValueError("a mistake")
        return super().aggregate_train(server_round, replies)


def test_a_run_that_fails_states_its_cost_too(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "ledger.sqlite"
    made = FailsLater(
        nn.Linear(3, 2), epsilon=8, delta=1e-5, clients=10, rounds=3, rate=1e-7, ledger=path
    )
    made.nodes = AnyNode(np.ones(10))
    with pytest.raises(ValueError, match="a mistake"):
        made.start(answering())
    assert "ledger head 1:" in capsys.readouterr().out.splitlines()[-1]


def test_what_evaluate_fn_returns_is_checked_before_the_first_round(tmp_path: Path) -> None:
    """Flower fails on the older (loss, metrics) only after all rounds have been charged."""
    made = alone(tmp_path / "ledger.sqlite")
    with pytest.raises(
        ConfigError,
        match=r"must return a MetricRecord, .* got tuple; \(loss, metrics\) belongs to",
    ):
        made.start(answering(), evaluate_fn=lambda round, arrays: (0.1, {"accuracy": 0.9}))  # type: ignore[arg-type]
    assert made.releaser.ledger.position() == 0


class ReadsMetrics(PrivateFedAvg):
    """A strategy of a user's own that expects what Flower's clients send."""

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        return arrays, MetricRecord({"loss": metrics["train_loss"]})


class ReadsReplies(PrivateFedAvg):
    """A strategy of a user's that reads every reply."""

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        losses = [reply.content["metrics"]["train_loss"] for reply in replies]
        arrays, _ = super().aggregate_train(server_round, replies)
        return arrays, MetricRecord({"loss": sum(losses)})


class OwnStart(ReadsMetrics):
    """A strategy of a user's that runs its rounds itself, as in Flower's advanced example."""

    def start(self, grid, arrays=None):
        messages = self.configure_train(1, self.initial_arrays(), ConfigRecord(), grid)
        return self.aggregate_train(1, grid.send_and_receive(messages))


class ReadsMetricsLater(PrivateFedAvg):
    """A strategy of a user's that reads figures in its second round only."""

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        return arrays, MetricRecord({"loss": metrics["train_loss"]} if server_round == 2 else {})


def overriding(kind: type[PrivateFedAvg], ledger: Path, **more: Any) -> PrivateFedAvg:
    options = {"epsilon": 8, "delta": 1e-5, "clients": 10, "rounds": 3, "rate": 1e-7} | more
    made = kind(nn.Linear(3, 2), ledger=ledger, **options)
    made.nodes = AnyNode(np.ones(10))
    return made


@pytest.mark.parametrize(
    ("kind", "charged"),
    [(ReadsMetrics, 0), (ReadsReplies, 0), (OwnStart, 0), (ReadsMetricsLater, 2)],
)
def test_an_override_that_reads_clients_metrics_is_told_why_there_are_none(
    kind: Any, charged: int, tmp_path: Path
) -> None:
    made = overriding(kind, tmp_path / "a.sqlite")
    with pytest.raises(
        ConfigError,
        match=rf"{kind.__name__}.aggregate_train looks for 'train_loss', which no client",
    ):
        made.start(answering())
    assert made.releaser.ledger.position() == charged


def test_clients_that_noise_are_not_charged_either(tmp_path: Path) -> None:
    made = overriding(ReadsMetrics, tmp_path / "a.sqlite", trust="local", rate=1.0, epsilon=100)
    with pytest.raises(ConfigError, match="looks for 'train_loss'"):
        made.start(answering())
    assert made.releaser.ledger.position() == 0


class Keeps(PrivateFedAvg):
    """A strategy of a user's with state of its own, which its `configure_train` prepares."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.seen, self.calls, self.expected = [], 0, {}

    def configure_train(self, server_round, arrays, config, grid):
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self.expected[server_round] = len(messages)
        return messages

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        self.seen.append(metrics.get("train_loss", 0.0))
        self.calls += 1
        print("round", server_round)
        return arrays, MetricRecord({"expected": self.expected[server_round]})


def test_the_trial_of_an_override_leaves_no_trace(tmp_path: Path, capsys: Any) -> None:
    made = overriding(Keeps, tmp_path / "a.sqlite")
    result = made.start(answering())
    assert (made.seen, made.calls, made.releaser.ledger.position()) == ([0.0] * 3, 3, 3)  # type: ignore[attr-defined]
    assert [line for line in capsys.readouterr().out.splitlines() if "round " in line][:3] == [
        "round 1",
        "round 2",
        "round 3",
    ]
    assert [dict(found) for found in result.train_metrics_clientapp.values()] == [
        {"expected": 0}
    ] * 3


def test_other_errors_of_a_users_functions_pass(tmp_path: Path) -> None:
    made = overriding(ReadsMetrics, tmp_path / "a.sqlite")
    with pytest.raises(KeyError, match="own mistake"):
        made.start(answering(), evaluate_fn=lambda round, arrays: {}["own mistake"])


def test_older_ways_to_start_a_strategy_are_refused(tmp_path: Path) -> None:
    made = strategy(tmp_path / "ledger.sqlite")
    with pytest.raises(
        ConfigError, match=r"older interface: call PrivateFedAvg\(...\).start\(grid\)"
    ):
        Server(client_manager=SimpleClientManager(), strategy=made).fit(1, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kind", [DifferentialPrivacyServerSideFixedClipping, DifferentialPrivacyClientSideFixedClipping]
)
def test_a_strategy_of_flowers_own_privacy_around_ours_is_refused(
    kind: Any, tmp_path: Path
) -> None:
    made = alone(tmp_path / "ledger.sqlite")
    with pytest.raises(ConfigError, match="another strategy wraps PrivateFedAvg"):
        kind(made, 1.0, 1.0, 10).start(answering(), made.initial_arrays(), 1)
    assert made.releaser.ledger.position() == 0


def complex_model() -> nn.Module:
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.complex64))
    return model


def not_finite(frozen: bool) -> nn.Module:
    model = nn.Linear(3, 2)
    model.weight.data[0, 0] = float("nan")
    model.weight.requires_grad_(not frozen)
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            complex_model(),
            "torch.complex64, .* train its real and imaginary parts as two parameters",
        ),
        (nn.LazyLinear(2), "has no size before the first forward pass"),
        (nn.Linear(3, 2, device="meta"), "'weight' is on the device meta and has no values"),
        (nn.Linear(3, 2).double(), r"must be float32: model.float\(\) converts"),
        (not_finite(frozen=False), "'weight' holds NaN or infinity before training"),
        (not_finite(frozen=True), "'weight' holds NaN or infinity before training"),
        ([np.zeros(3), np.zeros(2, dtype=complex)], "array 1 of the model is complex"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_server_and_client_refuse_what_cannot_be_trained(
    model: Any, words: str, tmp_path: Path
) -> None:
    """As `simulate` does; a complex parameter lost its imaginary part without a word."""
    with pytest.raises(ConfigError, match=words):
        strategy(tmp_path / "ledger.sqlite", model)
    assert not (tmp_path / "ledger.sqlite").exists()
    with pytest.raises(ConfigError, match=words):
        PrivateClientApp(model)


class Louder(LocalDpMod):
    """A mod of a user's that derives from Flower's."""


@pytest.mark.parametrize(
    "mod",
    [
        fixedclipping_mod,
        adaptiveclipping_mod,
        LocalDpMod(1.0, 1.0, 1.0, 1e-5),
        Louder(1.0, 1.0, 1.0, 1e-5),
        functools.partial(functools.partial(fixedclipping_mod)),
    ],
)
def test_mods_of_flowers_own_privacy_are_refused(mod: Any) -> None:
    words = "is a part of Flower's own differential privacy"
    with pytest.raises(ConfigError, match=words):
        PrivateClientApp(nn.Linear(3, 2), mods=[mod])
    app = PrivateClientApp(nn.Linear(3, 2))
    with pytest.raises(ConfigError, match=words):
        app.train(mods=[mod])
    assert app.train(mods=[message_size_mod]) is not None
