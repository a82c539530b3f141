"""The ServerApp of a deployment: the run's objects over `NodeGrid`."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from clients.flower_private import look_again_soon
from fedlgm.errors import ConfigError
from simulations.config.assembly import Assembly
from simulations.config.recipe import Recipe
from simulations.config.sections import Deployment
from simulations.deploy.layout import DeploymentFolder
from simulations.deploy.rows import Work
from simulations.runs.folder import RunFolder
from simulations.runs.rows import FullRow
from simulations.runs.server import serve
from strategies.node.answers import AnswerCheck
from strategies.node.enrolment import Enrolment
from strategies.node.grid import EnrolledNodes, NodeGrid
from strategies.node.questions import NodeQuestions
from strategies.node.round import Patience, RoundReport

TOLD = "nodes.log"  # lines for people, among the run's private files
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
    if recipe.mechanism.variant != "sound":
        raise ConfigError(
            f"mechanism.variant = {recipe.mechanism.variant!r} is not private, and real nodes make sound releases "
            "only: leave it out"
        )
    if test and run.seed is None:
        raise ConfigError("a test deployment needs run.seed, the seed that its nodes were made with")
    if federation.cohort is not None and federation.cohort > clients:
        raise ConfigError(f"federation.cohort = {federation.cohort} is more than the {clients} nodes there are")
    changed = {
        "federation": federation.model_copy(update={"clients": clients}),
        "run": run.model_copy(update={"seed": run.seed if test else None, "test_mode": test, "checkpoint_every": 1}),
        "deployment": recipe.deployment or Deployment(),
    }
    return Recipe.model_validate(recipe.model_copy(update=changed).model_dump())


def work_of(recipe: Recipe) -> Work:
    """What nodes are asked to do, by names that are installed there; see `fedlgm.node_protocol.Question`."""
    work: Work = {
        "mechanism": {"name": recipe.mechanism.name, **recipe.mechanism.options},
        "group_by": recipe.mechanism.group_by,
        "task": {"name": recipe.task.name, **recipe.task.options},
        "model": {"name": recipe.model.name, **recipe.model.options},
        "training": asdict(recipe.training.local),
    }
    if recipe.training.exact_sums:
        work["exact_sums"] = True
    return work


class NodesRecord:
    """What is written down of the nodes among the private files of a run: it says who took part.

    Args:
        folder: the run's.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def say(self, line: str) -> None:
        """Print a line, and keep it."""
        print(line, flush=True)
        self._folder.append_private(TOLD, line)

    def round(self, report: RoundReport) -> None:
        """Keep what became of a round's questions."""
        self._folder.append_private(REPORT, json.dumps(asdict(report)))

    def counted(self, row: FullRow, enrolment: Enrolment) -> None:
        """Print a round's line, and name the nodes whose signed answers broke a rule and count as zero."""
        figures = f", accuracy {row['accuracy']:.4f}, epsilon {row['epsilon']:.3f}" if "accuracy" in row else ""
        rejected = {
            enrolment[failure["client"]].name: failure["reason"]
            for failure in row.get("failures", [])
            if failure["kind"] == "rejected"
        }
        broken = "".join(f"; {name} counts as zero, its answer was rejected: {why}" for name, why in rejected.items())
        self.say(f"round {row['round']}: {row['cohort']} nodes asked, {row['seconds']:.2f} s{figures}{broken}")
        if rejected:
            self._folder.append_private(REPORT, json.dumps({"round": row["round"], "rejected": rejected}))


def make_server_app() -> ServerApp:
    """ServerApp that runs, or continues, the run folder named in the run config."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        deployment = DeploymentFolder.open(Path(str(context.run_config["deployment"])))
        folder = RunFolder.open(Path(str(context.run_config["run-dir"])))
        recipe = folder.recipe()
        assembly, federation = DeployedAssembly(recipe), recipe.federation
        record = NodesRecord(folder)

        from flwr.superlink.grid import http_grid

        look_again_soon(http_grid)
        enrolment = Enrolment.load(deployment.enrolment_file)
        questions = NodeQuestions(folder.path.name, work_of(recipe), deployment.signer())
        answers = AnswerCheck(
            enrolment, assembly.layers, positions=deployment.positions_file, test=deployment.settings().test
        )
        nodes = NodeGrid(
            grid, enrolment, questions, answers,
            patience=_patience(recipe), say=record.say, on_round=record.round,
        )  # fmt: skip
        enrolled = EnrolledNodes(
            round_timeout=federation.round_timeout, quorum=federation.quorum, max_failures=federation.max_failures,
            simulated=recipe.run.test_mode,
        )  # fmt: skip
        serve(nodes, assembly, folder, "deployment", partial(record.counted, enrolment=enrolment), nodes=enrolled)

    return app


def _patience(recipe: Recipe) -> Patience:
    federation, deployment = recipe.federation, recipe.deployment or Deployment()
    return Patience(
        quorum=federation.quorum or 0.0,
        round_seconds=federation.round_timeout or 600.0,
        offline_seconds=deployment.offline_seconds,
        give_up_seconds=deployment.give_up_seconds,
    )
