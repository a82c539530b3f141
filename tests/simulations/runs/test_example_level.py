"""Example-level privacy from recipes: one party, and clients that noise their own steps."""

from __future__ import annotations

import dataclasses
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.app.metadata import Metadata
from hostile import NodeGrid

from clients import AnyClient, OneClient
from fedlgm import wire
from fedlgm.errors import ConfigError, Notice, PrivacyError
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.noise.release import release
from fedlgm.privacy.ledger import Ledger
from fedlgm.training.example_level.central import train
from fedlgm.training.example_level.engine import ExampleGradients
from fedlgm.training.example_level.trainer import digest_of
from fedlgm_lab.reports.report import write_report
from simulations import launch
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.decided import resolve_hardware
from simulations.exports.export import export
from simulations.runs import new_folder
from simulations.runs.folder import RunFolder
from simulations.runs.server import serve
from simulations.summaries.ledgers import ledger_report
from strategies import OneNodePerClient
from tests.support.example_level import STEPS, central, federated


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return launch.simulate(central(), run_dir=tmp_path_factory.mktemp("central") / "run")


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return launch.simulate(federated(), run_dir=tmp_path_factory.mktemp("federated") / "run")


def examples(assembly):
    data, order = assembly.data.dataset, assembly.data.partition[0]
    return torch.from_numpy(data.train_x[order]), torch.from_numpy(data.train_y[order])


# -- one party ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("undrawn")
def test_a_run_says_what_it_protects_and_stays_within_its_budget(run):
    assert run["unit"] == "example"
    assert run["guarantee"].startswith(
        "proven (example-level, add-remove, a trusted server adds the noise)"
    )
    assert 3.9 < run["epsilon"] <= 4.0
    folder = RunFolder.open(Path(run["run"]))
    assert [row["round"] for row in folder.rows()] == list(range(1, STEPS + 1))
    with Ledger(folder.ledger_file) as ledger:
        assert ledger.verify(contiguous=True).rows == STEPS
    report = ledger_report(folder.path)
    assert report["clients"] == []
    assert write_report(folder.path)["report"].endswith("report.html")
    assert export(folder.path, "safetensors", None)["guarantee"] == run["guarantee"]


@pytest.mark.parametrize(
    "method",
    [
        ["mechanism.style=flat"],
        ["mechanism.style=per-layer", "mechanism.allocation=snr-consistent"],
        ["mechanism.style=per-layer", "mechanism.allocation=max-snr-sum", "mechanism.clip=med"],
        ["mechanism.style=per-layer", "mechanism.clip=med", "mechanism.norms=quantile"],
        ["mechanism.name=auto-s"],
        ["mechanism.name=dp-psac"],
    ],
)
def test_a_recipes_run_is_the_librarys_training(tmp_path, method):
    recipe = central(*method)
    result = launch.simulate(recipe, run_dir=tmp_path / "run")
    assembly = Assembly(resolve_hardware(recipe))
    x, y = examples(assembly)
    with Ledger(tmp_path / "ledger.sqlite", "alone") as ledger:
        alone = train(
            assembly.model.module(),
            x,
            y,
            assembly.privacy.method,
            keys=KeyRing.from_seed(7),
            ledger=ledger,
            lr=recipe.training.lr,
        )
    checkpoint = RunFolder.open(tmp_path / "run").checkpoints.latest(assembly.model.layers)
    assert torch.equal(checkpoint.transcript.models[-1], alone.model)
    assert result["epsilon"] == alone.epsilon


@pytest.mark.parametrize("style", ["flat", "per-layer"])
def test_a_run_equals_a_float64_loop_with_the_same_noise(tmp_path, style):
    """Per-example gradients by autograd, one after another, in float64.

    Released sums lie on a grid of sigma / 1024 or less: here and there a coordinate is rounded the
    other way."""
    recipe = central(f"mechanism.style={style}", "training.batch_size=40", "training.lr=0.3")
    launch.simulate(recipe, run_dir=tmp_path / "run")
    assembly = Assembly(resolve_hardware(recipe))
    x, y = examples(assembly)
    module, keys = assembly.model.module().double(), KeyRing.from_seed(7)
    parameters, layers = list(module.parameters()), assembly.model.layers
    plan, x = assembly.privacy.method.plan(assembly.privacy.start()), x.double()
    ends = layers.offsets.tolist()
    for step in range(1, STEPS + 1):
        rows = np.flatnonzero(
            keys.numpy_generator(Purpose.TRAIN, step, 0).random(len(y)) < 40 / len(y)
        )
        total = torch.zeros(plan.size, dtype=torch.float64)
        for row in rows:
            loss = torch.nn.functional.cross_entropy(module(x[row : row + 1]), y[row : row + 1])
            gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)])
            for clip, low, high in zip(plan.clip, ends[:-1], ends[1:], strict=True):
                part = gradient[low:high]
                total[low:high] -= part * min(1.0, float(clip / part.norm()))
        step_ = release(total, plan, keys, step) / 40 * recipe.training.lr  # on the same grid
        with torch.no_grad():
            for parameter, part in zip(
                parameters, step_.split([p.numel() for p in parameters]), strict=True
            ):
                parameter += part.view_as(parameter)
    expected = torch.cat([p.detach().reshape(-1) for p in parameters])
    found = (
        RunFolder.open(tmp_path / "run").checkpoints.latest(layers).transcript.models[-1].double()
    )
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_the_accounting_is_that_of_opacus(run):
    """Its RDP accountant to 1 % (it has other orders), its PRV accountant from above within its
    error of 0.01."""
    from opacus.accountants import PRVAccountant, RDPAccountant

    with Ledger(RunFolder.open(Path(run["run"])).ledger_file) as ledger:
        events = [charge.event for charge in ledger.charges()]
        spent = {kind: ledger.epsilon(1e-5, kind) for kind in ("rdp", "pld")}
    noise, rate = events[0].event.noise_multiplier, events[0].sampling_probability
    rdp, prv = RDPAccountant(), PRVAccountant()
    for accountant in (rdp, prv):
        accountant.history = [(noise, rate, len(events))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert spent["rdp"] == pytest.approx(rdp.get_epsilon(1e-5), rel=0.01)
        assert prv.get_epsilon(1e-5) - 0.021 < spent["pld"] < prv.get_epsilon(1e-5)
    assert rate == 128 / 1442


@pytest.mark.parametrize("make", [central, federated])
def test_exact_sums_change_rounding_only(tmp_path, make, run, many, monkeypatch):
    """On some processors not even the rounding, so the type of a step's sums is looked at."""
    types, summed = [], ExampleGradients.sum

    def watched(self, *arguments):
        found = summed(self, *arguments)
        types.append(found.total.dtype)
        return found

    monkeypatch.setattr(ExampleGradients, "sum", watched)
    result = launch.simulate(
        make("training.exact_sums=true", "training.kernel=torch"), run_dir=tmp_path / "run"
    )
    usual = run if make is central else many
    assert types[-1] == torch.float64, types
    assert result["epsilon"] == usual["epsilon"]
    if make is central:  # a client's noise depends on the model's very bits
        assert result["accuracy"] == pytest.approx(usual["accuracy"], abs=0.05)
    with pytest.raises(ConfigError, match=r"training\.exact_sums is for privacy.unit = 'example'"):
        recipes.load("digits", ["training.exact_sums=true"])


def test_plain_steps_are_labelled_as_not_private(tmp_path):
    result = launch.simulate(
        central("mechanism.name=sgd", "federation.rounds=6"), run_dir=tmp_path / "run"
    )
    assert result["epsilon"] == math.inf
    assert result["guarantee"].startswith(
        "NOT PRIVATE: this run asks for no privacy [example-level"
    )


class Stop(Exception):
    pass


def stopped_after(rounds: int):
    def progress(row):
        if row["round"] == rounds:
            raise Stop

    return progress


@pytest.mark.parametrize("seed", ["7", "none"])
@pytest.mark.parametrize("make", [central, federated])
def test_an_interrupted_run_ends_where_it_would_have_ended(tmp_path, make, seed, run, many):
    recipe = make(f"run.seed={seed}", "run.checkpoint_every=2")
    with pytest.raises(Stop):
        launch.simulate(recipe, run_dir=tmp_path / "run", progress=stopped_after(3))
    result = launch.resume(tmp_path / "run")
    whole = run if make is central else many
    assert result["epsilon"] <= 4.0
    with (
        Ledger(tmp_path / "run" / "ledger.sqlite") as ledger,
        Ledger(Path(whole["run"]) / "ledger.sqlite") as other,
    ):
        if seed == "7":
            assert result["model_sha256"] == whole["model_sha256"]
            assert ledger.noise_keys() == other.noise_keys()
        elif make is central:
            assert ledger.position() == STEPS


# -- clients that noise their own steps --------------------------------------------------------------------------------


def test_every_client_has_a_ledger_of_its_own(many):
    assert many["guarantee"].startswith(
        "proven (example-level, add-remove, each client adds its own noise)"
    )
    report = ledger_report(Path(many["run"]))
    releases = [row["releases"] for row in report["clients"]]
    assert {row["client"] for row in report["clients"]} == set(range(6))
    assert max(releases) == 4
    assert report["clients"][0]["epsilon"] == many["epsilon"] <= 4.0
    assert all(row["epsilon"] < 4.0 for row in report["clients"] if row["releases"] < 4)
    with Ledger(RunFolder.open(Path(many["run"])).ledger_file) as ledger:
        assert {charge.event.count for charge in ledger.charges()} == {3}


def test_nothing_is_gained_from_sampling_clients(many):
    """The worst-off client may be in every round: the noise is that of a federation in which all
    take part."""
    from opacus.accountants import RDPAccountant

    every = Assembly(resolve_hardware(federated("federation.rate=1"))).privacy.facts
    assert many["noise_multiplier"] == every.noise_multiplier
    accountant = RDPAccountant()
    accountant.history = [(every.noise_multiplier, every.steps.rate, 12)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert accountant.get_epsilon(1e-5) == pytest.approx(many["epsilon"], rel=0.01)


def test_a_client_at_its_limit_stays_out_and_the_run_goes_on(tmp_path):
    recipe = federated("privacy.max_participations=2", "federation.rate=1", "federation.rounds=4")
    with pytest.warns(Notice, match=r"clients 0, 1, 2, 3, 4, 5 are not invited again"):
        result = launch.simulate(recipe, run_dir=tmp_path / "run")
    rows = RunFolder.open(tmp_path / "run").rows(private=True)
    assert [row["present"] for row in rows] == [6, 6, 0, 0]
    assert [row["exhausted"] for row in rows] == [[], [], [*range(6)], [*range(6)]]
    assert 3.9 < result["epsilon"] <= 4.0


def test_a_client_without_data_looks_like_any_other(tmp_path):
    few = (
        "data.partition=dirichlet",
        "data.alpha=0.02",
        "federation.clients=40",
        "federation.rate=1",
    )
    recipe = federated(*few, "training.batch_size=2", "federation.rounds=1", "training.steps=1")
    assert (Assembly(recipe).data.sizes == 0).any()
    launch.simulate(recipe, run_dir=tmp_path / "run")
    assert len(ledger_report(tmp_path / "run")["clients"]) == 40


def ask(assembly, client, plan, round_=1, context=None, model=None):
    """A server's message to client 2, and its reply."""
    model = assembly.model.initial() if model is None else model
    arrays = ArrayRecord({wire.MODEL: Array(**wire.fields(model.numpy()))})
    config = ConfigRecord({wire.PLAN: plan.to_json(), wire.ROUND: round_, wire.CLIENTS: [2]})
    content = RecordDict({wire.ARRAYS: arrays, wire.CONFIG: config})
    metadata = Metadata(1, f"{round_}", 1, 1, "", "", 0.0, 9e9, MessageType.TRAIN)
    message = Message(content=content, metadata=metadata)
    reply = client.train(message, context or Context(1, 1, {}, RecordDict(), {}))
    return wire.view(reply.content.array_records[wire.ARRAYS][wire.SUM].data).copy()


@pytest.fixture(scope="module")
def node():
    """A client's own objects, and the plan that it has agreed to."""
    assembly = Assembly(resolve_hardware(federated("privacy.max_participations=2")))
    client = assembly.client(KeyRing.from_seed(None), OneClient(2, 6, simulated=True))
    return assembly, client, assembly.privacy.method.plan(assembly.privacy.start())


def test_the_server_cannot_ask_for_more_than_a_client_agreed_to(node):
    assembly, client, plan = node
    context = Context(1, 1, {}, RecordDict(), {})
    first = ask(assembly, client, plan, 1, context)
    assert np.array_equal(
        ask(assembly, client, plan, 1, context), first
    )  # the same request is the same release
    other = ask(assembly, client, plan, 1, context, assembly.model.initial() + 1)
    assert not np.array_equal(other, first)
    with pytest.raises(PrivacyError, match="has made the 2 releases it agreed to"):
        ask(assembly, client, plan, 2, context)


class ThreeNodes(NodeGrid):
    """A client's refusal is an error reply, as on real nodes."""

    clients, population = (0, 1, 2), 3


def test_a_client_that_refuses_counts_as_zero_and_the_round_goes_on(tmp_path):
    """Client 2 has agreed to one release by its own recipe; the server's says four."""
    recipe = federated("federation.clients=3", "federation.rate=1", "federation.rounds=3")
    cautious = federated(
        "federation.clients=3", "federation.rate=1", "privacy.max_participations=1"
    )
    keys, assembly = KeyRing.from_seed(7), Assembly(resolve_hardware(recipe))
    sources = [assembly, assembly, Assembly(resolve_hardware(cautious))]
    apps = [
        own.client(keys, OneClient(i, 3, simulated=True)).as_app() for i, own in enumerate(sources)
    ]
    folder = new_folder.create(tmp_path / "run", recipe)
    result = serve(
        ThreeNodes(apps), assembly, folder, "local", nodes=OneNodePerClient(simulated=True)
    )
    assert result["rounds"] == 3
    failures = [[f["client"] for f in row["failures"]] for row in folder.rows(private=True)]
    assert failures == [[], [2], [2]]
    assert (
        "has made the 1 releases it agreed to"
        in folder.rows(private=True)[1]["failures"][0]["reason"]
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda f: {"steps": dataclasses.replace(f.steps, count=4)},
            "agreed to 3 steps per round at the rate 0.1",
        ),
        (
            lambda f: {"steps": dataclasses.replace(f.steps, rate=0.2)},
            "refuses a plan with 3 steps at the rate 0.2",
        ),
        (lambda f: {"steps": None, "relation": "replace-one"}, "agreed to noise its local steps"),
        (lambda f: {"noise_multiplier": f.noise_multiplier / 2}, "agreed to a noise multiplier of"),
    ],
)
def test_plans_that_cost_more_are_refused(node, change, words):
    assembly, client, plan = node
    facts = dataclasses.replace(plan.facts, **change(plan.facts))
    sigma = plan.sigma * facts.noise_multiplier / plan.facts.noise_multiplier
    with pytest.raises(PrivacyError, match=words):
        ask(assembly, client, dataclasses.replace(plan, facts=facts, sigma=sigma))


def test_local_steps_are_those_of_a_float64_loop_and_their_noise_is_as_planned(node):
    """With hardly any noise the update is that of plain clipped steps; what noise adds has the
    planned length."""
    assembly, _, plan = node
    rate, keys = plan.facts.training.lr, KeyRing.from_seed(5)
    client = dataclasses.replace(assembly.privacy.consent(), protected=False)
    quiet = dataclasses.replace(plan, sigma=plan.sigma * 1e-9)
    served = assembly.client(keys, AnyClient())
    served._consent = client
    found = ask(assembly, served, quiet)
    model, order = assembly.model.initial(), assembly.data.partition[2]
    x, y = (
        torch.from_numpy(assembly.data.dataset.train_x[order]).double(),
        torch.from_numpy(assembly.data.dataset.train_y[order]),
    )
    own = keys.derive(model.numpy().tobytes(), quiet.to_json().encode())
    digest = digest_of(x.float(), y)
    module = assembly.model.module().double()
    parameters = list(module.parameters())
    before = torch.cat([p.detach().reshape(-1) for p in parameters])
    for step in (1, 2, 3):
        drawn = (
            own.derive(b"batches", digest).numpy_generator(Purpose.TRAIN, 1, 2, step).random(len(y))
        )
        total = torch.zeros(len(before), dtype=torch.float64)
        for row in np.flatnonzero(drawn < plan.facts.steps.rate):
            loss = torch.nn.functional.cross_entropy(module(x[row : row + 1]), y[row : row + 1])
            gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)])
            total += gradient * min(1.0, 1.0 / float(gradient.norm()))
        with torch.no_grad():
            for p, part in zip(
                parameters, total.split([p.numel() for p in parameters]), strict=True
            ):
                p -= rate / plan.facts.steps.batch * part.view_as(p)
    expected = torch.cat([p.detach().reshape(-1) for p in parameters]) - before
    assert float((torch.from_numpy(found) - expected).norm() / expected.norm()) < 1e-5
    noisy = np.concatenate([ask(assembly, served, plan, round_) - found for round_ in range(2, 6)])
    assert np.std(noisy) == pytest.approx(float(plan.upload_sigma[0]), rel=0.1)
