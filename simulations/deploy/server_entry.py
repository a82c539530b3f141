"""The ServerApp of a deployment: the run's objects over `NodeGrid`."""

from __future__ import annotations

import json
import os
import secrets
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedlgm.errors import ConfigError
from fedlgm.keys import KeyRing
from simulations.config.assembly import Assembly
from simulations.config.recipe import Deployment, Recipe
from simulations.deploy.layout import DeploymentFolder
from simulations.runs.folder import RunFolder
from simulations.runs.server import serve
from strategies.nodes import Enrolment, NodeGrid, Patience, RoundReport

TOLD = "nodes.log"  # lines for people, in the run's folder
REPORT = "nodes.jsonl"  # what became of each round's questions


class DeployedAssembly(Assembly):
    """The objects of a run whose clients keep their data: the server has the recipe's test set, and no partition."""

    @property
    def sizes(self) -> np.ndarray:
        """Nobody knows how many examples a node has: they count alike, [clients]."""
        return np.ones(self.recipe.federation.clients, dtype=np.int64)


def deployed(recipe: Recipe, clients: int, *, test: bool = False) -> Recipe:
    """The recipe as a deployment runs it: with its number of nodes, its own keys and a checkpoint in every round.

    Args:
        recipe: as written.
        clients: enrolled nodes.
        test: keep the recipe's seed, for nodes that were made for tests with the same one.

    Raises:
        ConfigError: what real nodes cannot do.
    """
    federation, run = recipe.federation, recipe.run
    if federation.dropout or federation.stragglers:
        raise ConfigError("federation.dropout and federation.stragglers are simulated: set both to 0 for real nodes")
    if test and run.seed is None:
        raise ConfigError("a test deployment needs run.seed, the seed that its nodes were made with")
    if federation.cohort is not None and federation.cohort > clients:
        raise ConfigError(f"federation.cohort = {federation.cohort} is more than the {clients} nodes there are")
    changed = {
        "federation": federation.model_copy(update={"clients": clients}),
        "run": run.model_copy(update={"seed": run.seed if test else None, "checkpoint_every": 1}),
        "deployment": recipe.deployment or Deployment(),
    }
    return Recipe.model_validate(recipe.model_copy(update=changed).model_dump())


def work_of(recipe: Recipe) -> dict[str, Any]:
    """What nodes are asked to do, by names that are installed there; see `fedlgm.node_protocol.Question`."""
    return {
        "mechanism": recipe.mechanism.name,
        "group_by": recipe.mechanism.group_by,
        "task": "classification",
        "model": {"name": recipe.model.name, **recipe.model.options},
        "training": asdict(recipe.training.local),
    }


def make_server_app() -> ServerApp:
    """ServerApp that runs, or continues, the run folder named in the run config."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        deployment = DeploymentFolder.open(Path(str(context.run_config["deployment"])))
        folder = RunFolder.open(Path(str(context.run_config["run-dir"])))
        recipe = folder.recipe()
        assembly, patience = DeployedAssembly(recipe), recipe.deployment or Deployment()
        log, report = folder.path / TOLD, folder.path / REPORT

        def say(line: str) -> None:
            print(line, flush=True)
            with log.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

        def record(round_: RoundReport) -> None:
            with report.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(round_)) + "\n")

        nodes = NodeGrid(
            grid,
            Enrolment.load(deployment.enrolment_file),
            assembly.layers,
            work_of(recipe),
            folder.path.name,
            patience=Patience(**patience.model_dump()),
            signer=deployment.signer(),
            positions=deployment.positions_file,
            test=deployment.settings().test,
            say=say,
            on_round=record,
        )
        warnings.filterwarnings(
            "ignore", message="without a seed"
        )  # the nodes' kept answers repeat a round for nothing
        serve(nodes, assembly, folder, _keys(folder, recipe), "deployment", _tell(say))

    return app


def _tell(say: Any) -> Any:
    def tell(row: dict[str, Any]) -> None:
        figures = f", accuracy {row['accuracy']:.4f}, epsilon {row['epsilon']:.3f}" if "accuracy" in row else ""
        say(f"round {row['round']}: {row['cohort']} nodes asked, {row['seconds']:.2f} s{figures}")

    return tell


def _keys(folder: RunFolder, recipe: Recipe) -> KeyRing:
    """Keys of cohorts and of the server's noise.

    Under local trust the server draws no noise that protects: the keys are kept with the run, so that a resumed run
    asks the same questions, which cost the nodes nothing. Under central trust they are fresh: a round that is repeated
    with other answers must not have the same noise.
    """
    if recipe.run.seed is not None:
        return KeyRing.from_seed(recipe.run.seed)
    if recipe.privacy.trust == "central":
        return KeyRing.from_seed(None)
    file = folder.path / "server.key"
    if not file.is_file():
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as new:
            new.write(str(secrets.randbits(128)))
    return KeyRing(int(file.read_text()))
