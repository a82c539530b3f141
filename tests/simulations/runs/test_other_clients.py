"""A run is continued with the clients that it had: simulated ones do not take the place of real
nodes."""

from __future__ import annotations

import contextlib
import json

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from clients import AnyClient
from fedlgm.errors import RunError
from fedlgm.noise.keys import KeyRing
from fedlgm.privacy.ledger import Ledger
from simulations import launch
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.decided import resolve_hardware
from simulations.engines import flower_entry
from simulations.engines.flower_entry import make_server_app
from simulations.engines.local import LocalGrid
from simulations.runs import new_folder
from simulations.runs.folder import RunFolder
from simulations.runs.provenance import provenance_of
from simulations.runs.server import nodes_of, serve
from strategies import AnyNode, OneNodePerClient


class Interrupted(Exception):
    """What a user's callback may raise."""


def stop(row):
    if row["round"] == 1:
        raise Interrupted


@pytest.mark.filterwarnings("ignore:run.test_mode")
@pytest.mark.parametrize("test_mode", [False, True])
def test_a_run_of_real_nodes_is_not_continued_with_simulated_clients(tiny, tmp_path, test_mode):
    """`--resume --engine local` trained on simulated clients and called it the same run."""
    seed = 3 if test_mode else None
    assembly = Assembly(
        tiny(run={"seed": seed, "test_mode": test_mode}, federation={"wait_for_nodes": 0.1})
    )
    folder = new_folder.create(tmp_path / "run", assembly.recipe)
    nodes = nodes_of(assembly, "clients")
    assert not nodes.simulated
    with pytest.raises(RunError, match="have no node after 0 s"):
        serve(LocalGrid(silent()), assembly, folder, "flower", nodes=nodes)
    with pytest.raises(
        RunError, match="was run with real nodes: it cannot be continued with simulated clients"
    ):
        launch.resume(folder.path)
    assert not list((folder.path / "checkpoints").iterdir())


def silent() -> ClientApp:
    """A node that says nothing about itself."""
    app = ClientApp()

    @app.query()
    def say_nothing(message: Message, context: Context) -> Message:
        return Message(RecordDict(), reply_to=message)

    return app


def test_a_simulation_is_not_continued_with_real_nodes(tiny, tmp_path):
    assembly = Assembly(tiny(run={"seed": None}))
    with pytest.raises(Interrupted):
        launch.simulate(assembly.recipe, run_dir=tmp_path / "run", progress=stop)
    folder = RunFolder.open(tmp_path / "run")
    rows = folder.metrics.path.read_text()
    with pytest.raises(
        RunError, match="was run with simulated clients: it cannot be continued with real nodes"
    ):
        serve(LocalGrid(silent()), assembly, folder, "flower", nodes=OneNodePerClient(wait=0.1))
    assert folder.metrics.path.read_text() == rows


def test_engines_of_a_simulation_continue_each_other(tiny, tmp_path):
    """Power: what is refused is other clients, not another engine."""
    with pytest.raises(Interrupted):
        launch.simulate(tiny(), run_dir=tmp_path / "run", progress=stop)
    assembly = Assembly(tiny())
    folder = RunFolder.open(tmp_path / "run")
    result = launch.resume(folder.path)
    assert (
        result["model_sha256"]
        == launch.simulate(tiny(), run_dir=tmp_path / "whole")["model_sha256"]
    )
    simulated = [AnyNode(), OneNodePerClient(simulated=True)]
    assert {provenance_of(assembly, nodes)["clients"] for nodes in simulated} == {
        "simulated clients"
    }


@pytest.mark.parametrize("options", [{}, {"test_mode": True}])
def test_real_nodes_are_told_apart_from_simulated_ones(tiny, options):
    made = provenance_of(Assembly(tiny()), OneNodePerClient(**options))
    assert made["clients"] == "real nodes"
    json.dumps(made)


class TestRemovingValues:
    """`--set section.key=none`: the seed of a bundled recipe could not be removed."""

    def test_a_seed(self):
        assert recipes.load("digits").run.seed is not None
        assert recipes.load("digits", ["run.seed=none"]).run.seed is None

    def test_other_values_fall_back_to_their_defaults(self):
        assert recipes.load("digits", ["run.evaluate_every=none"]).run.evaluate_every == 1
        assert recipes.load("digits", ["training=none"]).training.epochs == 1

    def test_the_mechanism_none_is_a_mechanism(self):
        assert recipes.load("digits", ["mechanism.name=none"]).mechanism.name == "none"

    def test_later_values_win(self):
        assert recipes.load("digits", ["run.seed=none", "run.seed=4"]).run.seed == 4
        assert recipes.load("digits", ["run.seed=4", "run.seed=none"]).run.seed is None
        assert recipes.load("digits", ["run.seed=4", "run=none"]).run.seed is None


@pytest.mark.parametrize("trust", ["central", "local"])
@pytest.mark.parametrize("keyed", [False, True])
def test_a_round_that_other_keys_make_again_is_another_release(
    tiny, tmp_path, monkeypatch, trust, keyed
):
    """`flwr run` gives simulated nodes new keys, unless the run config names those of the run's
    folder."""
    changes = {"trust": trust} | ({"max_participations": 8} if trust == "local" else {})
    recipe = resolve_hardware(
        tiny(
            run={"seed": None, "checkpoint_every": 10},
            federation={"rounds": 8, "rate": 1.0},
            privacy=changes,
        )
    )
    folder = new_folder.create(tmp_path / "run", recipe)
    config = {"run-dir": str(folder.path), "recipe": str(folder.recipe_file), "nodes": "workers"}
    config |= {"keys": str(folder.path)} if keyed else {}
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)

    def run() -> None:
        keys = folder.keys(None)[0] if keyed else KeyRing.from_seed(None)
        make_server_app()(LocalGrid.of(Assembly(recipe).client(keys, AnyClient())), context)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(flower_entry, "print_row", stop)
        with pytest.raises(Interrupted):
            run()
    with (
        contextlib.nullcontext()
        if keyed
        else pytest.warns(UserWarning, match="released again with fresh noise")
    ):
        run()
    with Ledger(folder.ledger_file) as ledger:
        assert ledger.has_repeated_rounds() is not keyed
        assert folder.verified_result()["epsilon"] == pytest.approx(
            ledger.epsilon(recipe.privacy.delta, "rdp")
        )
    within = keyed or trust == "local"  # where clients reach their cap sooner
    assert (folder.verified_result()["epsilon"] <= recipe.privacy.epsilon) is within
