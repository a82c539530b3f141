"""The ServerApp of a deployment, which runs a recipe over real nodes through `NodeGrid` or
`SecureGrid`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from typing_extensions import override

from clients.flower_private import hasten_server_grid
from fedlgm import data
from fedlgm.data import DataSet
from fedlgm.data.named_tables import NAME as TABLE
from fedlgm.errors import ConfigError, DivergedError
from fedlgm.files import explain_failure
from fedlgm.privacy.ledger import Ledger
from fedlgm.training.models import digest_of_file
from fedlgm_nodes.deploy import federation_page
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.health import Health
from fedlgm_nodes.secagg.cohort import MOST_NODES
from fedlgm_nodes.server.answers import AnswerCheck
from fedlgm_nodes.server.budgets import Need
from fedlgm_nodes.server.enrolment import Enrolment
from fedlgm_nodes.server.node_grid import EnrolledNodes, NodeGrid
from fedlgm_nodes.server.open_attempt import AttemptFile, LostAttempt
from fedlgm_nodes.server.questions import NodeQuestions, signed_at
from fedlgm_nodes.server.round import Patience, RoundReport
from fedlgm_nodes.server.secure_grid import EnrolledSum, SecureGrid
from simulations.config.assembly import Assembly
from simulations.config.named_sections import Data
from simulations.config.recipe import Recipe
from simulations.config.run_data import RunData
from simulations.config.sections import Deployment
from simulations.engines.flower_command import COMPLETED
from simulations.runs.folder import RunFolder
from simulations.runs.rows import FullRow
from simulations.runs.server import serve

# Name of a private file that a ServerApp writes when it ends, unless it is killed. After a run
# without an error the file holds the status that Flower gives later.
ENDED = "ended"
TOLD = "nodes.log"  # file of progress lines, among the run's private files
ATTEMPT = "attempt.json"  # file of the open attempt at a round, among the run's private files
_POLL_S = 0.2
REPORT = "nodes.jsonl"  # file with the reports of the rounds


class _NodesData(RunData):
    @cached_property
    @override
    def dataset(self) -> DataSet:
        """The public test examples or, if the recipe names a table without test rows, a table
        without rows.
        """
        section = self.recipe.data
        if section.name != TABLE or section.test_file is not None:
            return super().dataset
        # `_check_stated` has checked that the recipe names the columns
        return cast(DataSet, data.outline(TABLE, **section.reading))

    @property
    @override
    def sizes(self) -> np.ndarray:
        """Equal sizes [clients], because the nodes' numbers of examples are unknown."""
        return np.ones(self.recipe.federation.clients, dtype=np.int64)


DeployedAssembly = partial(Assembly, data=_NodesData)
"""The objects of a run whose clients keep their data. The server has the recipe's test set, or only
the columns of a table. It has no partition.
"""


def recipe_for_nodes(recipe: Recipe, clients: int, *, test: bool = False) -> Recipe:
    """The recipe as a deployment runs it: with the number of enrolled nodes, with fresh random keys
    instead of the recipe's seed, and with a checkpoint in every round.

    Args:
        recipe: the recipe as written.
        clients: number of enrolled nodes.
        test: keep the recipe's seed, for nodes that were made for tests with the same seed.

    Raises:
        ConfigError: real nodes do not support a setting.
    """
    federation, run = recipe.federation, recipe.run
    recipe.protects.check_nodes(recipe.federation.sampling == "allocation")
    if federation.dropout or federation.stragglers:
        raise ConfigError(
            "federation.dropout and federation.stragglers are simulated: set both to 0 for real "
            "nodes"
        )
    if recipe.data.name == TABLE:
        recipe = recipe.model_copy(update={"data": _public_table(recipe)})
    elif recipe.data.standardise is not None:
        raise ConfigError(
            "data.standardise: real nodes read their own rows, which this recipe does not "
            "standardise: standardise the rows of all nodes and the test rows with the same "
            "public figures, and leave this key out, or use data.name = 'table'"
        )
    own = recipe.deployment or Deployment()
    if own.one_node_per_person and recipe.unit == "client" and recipe.relation != "replace-one":
        raise ConfigError(
            "deployment.one_node_per_person: a person is a part of a node's data, and this recipe's "
            f"epsilon holds for whole nodes that come or go ({recipe.relation}): set "
            "privacy.relation = 'replace-one', or privacy.unit = 'example' with one row per person"
        )
    _check_overlap(recipe, own)
    if recipe.mechanism.variant != "sound":
        raise ConfigError(
            f"mechanism.variant = {recipe.mechanism.variant!r} is not private, and real nodes make "
            "only sound releases: leave it out"
        )
    if recipe.model.adapters is not None and recipe.model.weights is None:
        raise ConfigError(
            "model.adapters: all nodes must have the same frozen base: name its file in "
            "model.weights, and its SHA-256 in every node's policy ([allow] weights)"
        )
    if test and run.seed is None:
        raise ConfigError(
            "a test deployment needs run.seed, the seed that its nodes were made with"
        )
    result = recipe.with_values(
        federation={"clients": clients},
        run={"seed": run.seed if test else None, "test_mode": test, "checkpoint_every": 1},
    ).model_copy(update={"deployment": own})
    result = Recipe.model_validate(result.model_dump())
    asked = round(result.federation.share * clients)
    if result.distributed is not None and asked > MOST_NODES:
        raise ConfigError(
            f"a round of {asked} real nodes: at most {MOST_NODES} can make a secure sum. Set a "
            "lower federation.rate or federation.cohort"
        )
    return result


def _check_overlap(recipe: Recipe, own: Deployment) -> None:
    """Refuse a recipe that asks for a joint epsilon of people that real nodes cannot guarantee.

    Raises:
        ConfigError: the recipe says that each person counts at one node only, or its epsilon holds
            for whole nodes that are added or removed, which does not cover a change of one person's
            rows.
    """
    if recipe.federation.overlap in (None, 1):
        return
    if own.one_node_per_person:
        raise ConfigError(
            f"federation.overlap = {recipe.federation.overlap}, but deployment.one_node_per_person "
            "says that each person counts at one node: leave one of them out"
        )
    if recipe.unit == "client" and recipe.relation != "replace-one":
        raise ConfigError(
            "federation.overlap: a person is a part of a node's data, and this recipe's epsilon "
            f"holds for whole nodes that come or go ({recipe.relation}): set privacy.relation = "
            "'replace-one', or privacy.unit = 'example' with one row per person at each node"
        )


def _public_table(recipe: Recipe) -> Data:
    """A table as the server of real nodes reads it. The server has only the public test rows, which
    give columns, classes and figures. Each node compares these with its policy.

    Without test rows, the recipe states columns, classes and figures, and the server evaluates
    nothing.

    Raises:
        ConfigError, DataError: the test rows cannot be used, or the recipe states too little.
    """
    section = recipe.data
    if section.test_file is None:
        _check_stated(recipe)
        return Data.model_validate(section.model_dump() | {"file": None, "users": None})
    values: dict[str, Any] = {"file": section.test_file, "users": None}
    public = data.load(TABLE, **(section.reading | values))
    if public.columns is None:
        raise ConfigError("data.inputs: for real nodes, each column must hold one number per row")
    for column in public.columns:
        values.setdefault("inputs", []).append(column["name"])
        if "mean" in column:
            figures = float(f"{column['mean']:.6g}"), float(f"{column['deviation']:.6g}")
            values.setdefault("standardise", {})[column["name"]] = figures
    if public.labels is not None:
        values["labels"] = list(public.labels)
    return Data.model_validate(section.model_dump() | values)


def _check_stated(recipe: Recipe) -> None:
    """Refuse a table without test rows if the recipe does not state what test rows would show.

    Raises:
        ConfigError: see above; the message names the key.
    """
    section, more = recipe.data, "or name public test rows in data.test_file"
    if not section.inputs:
        raise ConfigError(
            f"data.inputs: list the columns of the nodes' policies (features), {more}"
        )
    if recipe.task.name == "classification" and not (section.labels or section.classes):
        raise ConfigError(
            "data.labels: list the classes as the nodes' policies do (class_names), or give "
            f"their number in data.classes, {more}"
        )
    for key, problem in (
        ("data.standardise", section.standardise == "test"),
        ("data.categories", section.categories is not None),
        ("data.fill", section.fill is not None),
        ("run.patience", recipe.run.patience is not None),
    ):
        if problem:
            raise ConfigError(f"{key}: needs public test rows: leave it out, {more}")


def work_of(recipe: Recipe) -> dict[str, Any]:
    """The work that a run requests, described by names that are installed on the nodes (see
    `fedlgm_nodes.protocol.messages.Question`).
    """
    model: dict[str, Any] = {"name": recipe.model.name, **recipe.model.options}
    if recipe.model.weights is not None:
        # each node has its own copy, which its policy pins
        model["weights"] = digest_of_file(recipe.model.weights)
    if recipe.model.adapters is not None:
        seed = (recipe.run.seed or 0) if recipe.model.seed is None else recipe.model.seed
        # a frozen A is not sent: each node draws it from this seed
        model["adapters"] = {"seed": seed, **recipe.model.adapters}
    work: dict[str, Any] = {
        "mechanism": {"name": recipe.mechanism.name, **recipe.mechanism.options},
        "group_by": recipe.mechanism.group_by,
        "task": {"name": recipe.task.name, **recipe.task.options},
        "model": model,
        "training": recipe.training.local.to_dict(),
    }
    if recipe.training.exact_sums:
        work["exact_sums"] = True  # for example-level steps
    if recipe.deployment is not None and recipe.deployment.one_node_per_person:
        work["people"] = True
    if recipe.data.name == TABLE:
        columns = recipe.data.model_dump(mode="json", include={"inputs", "labels", "standardise"})
        work["table"] = {name: value for name, value in columns.items() if value is not None}
    return work


def remaining_need(assembly: Assembly, run: str, *, done: int) -> Need | None:
    """A run's remaining demand on each node; None if there is none.

    Rounds of different cost are replaced by the same number of equal rounds with the same total
    cost. If a node may be drawn in any round, the demand is the 99 % quantile of its number of
    rounds.

    Args:
        assembly: objects of the run.
        run: label of the run.
        done: number of finished rounds.
    """
    facts, method, plan = (
        assembly.privacy.facts,
        assembly.privacy.method,
        assembly.privacy.first_plan(),
    )
    costs = np.array(method.mechanism.costs(method.layers, facts.rounds), dtype=float)
    scale = math.sqrt(costs[0] / costs.mean())
    if scale != 1:
        plan = replace(
            plan,
            sigma=plan.sigma * scale,
            queries=tuple(replace(query, sigma=query.sigma * scale) for query in plan.queries),
        )
    left, releases = facts.rounds - done, facts.releases
    if (
        facts.max_participations is None
        and not facts.sampling.scheduled
        and facts.sampling.rate < 1
    ):
        import scipy.stats

        releases = int(scipy.stats.binom.ppf(0.99, facts.rounds, facts.sampling.rate))
    return (
        Need(run, work_of(assembly.recipe), plan.to_json(), min(releases, left))
        if min(releases, left) > 0
        else None
    )


class NodesRecord:
    """Record of a run's nodes. It is among the run's private files, because it shows who took part.

    Args:
        folder: the run's folder.
        summed: whether the server sees only the sum of each round. Such a round is void if no node
            may take part in it.
    """

    def __init__(self, folder: RunFolder, summed: bool) -> None:
        self._folder, self._summed = folder, summed

    @classmethod
    def of(cls, folder: RunFolder) -> NodesRecord:
        """The record of a run."""
        return cls(folder, summed=not folder.recipe().noised_by.alone)

    def say(self, line: str) -> None:
        """Print a line, and append it to the record."""
        print(line, flush=True)
        self._folder.append_private(TOLD, line)

    def round(self, report: RoundReport) -> None:
        """Store the report of a round's questions."""
        self._folder.append_private(REPORT, json.dumps(asdict(report)))

    def print_round(self, row: FullRow) -> None:
        """Print a round's line."""
        if self._summed and not row["cohort"]:
            self.say(
                f"round {row['round']} is void and leaves the model unchanged: no node may take "
                "part in it any more"
            )
            return
        figures = f", accuracy {row['accuracy']:.4f}" if "accuracy" in row else ""
        figures += f", epsilon {row['epsilon']:.3f}" if "epsilon" in row else ""
        self.say(
            f"round {row['round']}: {row['cohort']} nodes asked, {row['seconds']:.2f} s{figures}"
        )

    def write_page(self, releases: Mapping[str, int | None], faults: Iterable[str]) -> None:
        """Write the federation's page (see `fedlgm_nodes.deploy.federation_page`)."""
        federation_page.write(self._folder, self._last_reports(), releases, faults)

    def void(self) -> int:
        """Number of the run's rounds that were void: nobody was asked, or the round's last attempt
        gave no sum.
        """
        last = self._last_reports()
        rows = self._folder.rows(private=True) if self._summed else []
        return sum(
            not row.get("skipped")
            and not (
                row.get("cohort", 1) and last.get(row["round"], {"answered": True})["answered"]
            )
            for row in rows
        )

    def silent(self) -> list[str]:
        """A line for each node whose answer is missing in a round that asked it, with the number of
        such rounds and the reason in the last of them.
        """
        reasons: dict[str, list[str]] = {}
        for report in self._last_reports().values():
            for name, why in report["lost"].items():
                reasons.setdefault(name, []).append(why)
        return [
            f"{name} counted as zero in {len(whys)} round{'s' * (len(whys) > 1)}: {whys[-1]}"
            for name, whys in sorted(reasons.items())
        ]

    def _last_reports(self) -> dict[int, dict[str, Any]]:
        """The report of each round's last attempt."""
        file = self._folder.private / REPORT
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        return {report["round"]: report for report in map(json.loads, lines)}

    def print_totals(self, rounds: int) -> None:
        """Print how many rounds of a run were done, how many were void, and whose answers are
        missing.
        """
        void = self.void()
        done = len(self._folder.rows()) - void
        are = "is" if void == 1 else "are"
        for line in self.silent():
            self.say(line)
        self.say(
            f"{done} of {rounds} rounds are done"
            + (f"; {void} {are} void and left the model unchanged" if void else "")
        )


def make_server_app() -> ServerApp:
    """Make the ServerApp that starts, or continues, the run whose folder the run config names."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        _work_in(str(context.run_config["directory"]))
        deployment = DeploymentFolder.open(Path(str(context.run_config["deployment"])))
        folder = RunFolder.open(Path(str(context.run_config["run-dir"])))
        with folder.writing():
            try:
                # the lock is held from the start, so that a kill is noticed at once
                with folder.lock():
                    _serve(grid, deployment, folder)
                folder.append_private(ENDED, COMPLETED)
            except BaseException:
                folder.private_file(ENDED)
                raise

    return app


def _serve(grid: Grid, deployment: DeploymentFolder, folder: RunFolder) -> None:
    recipe = folder.recipe()
    assembly, federation = DeployedAssembly(recipe), recipe.federation
    alone = assembly.privacy.facts.noised_by.alone
    record = NodesRecord.of(folder)

    hasten_server_grid()
    enrolment = Enrolment.load(deployment.enrolment_file)
    questions = NodeQuestions(
        folder.path.name, work_of(recipe), partial(signed_at, deployment.signer.socket)
    )
    answers = AnswerCheck(
        enrolment,
        assembly.model.layers,
        positions=deployment.positions_file,
        test=deployment.settings().test,
    )
    nodes = (NodeGrid if alone else SecureGrid)(
        grid, enrolment, questions, answers,
        patience=_patience(recipe), say=record.say, on_round=record.round,
    )  # fmt: skip
    enrolled = (EnrolledNodes if alone else EnrolledSum)(
        round_timeout=federation.round_timeout,
        quorum=federation.quorum,
        max_failures=federation.max_failures,
        simulated=recipe.run.test_mode,
    )
    file = AttemptFile(folder.private / ATTEMPT)
    if isinstance(nodes, SecureGrid):
        nodes.file = file

    anchors = nodes.anchors(folder) if recipe.run.keep_releases else None

    def close_round(row: FullRow) -> None:  # it is called when the round's checkpoint is on disk
        file.close()
        record.print_round(row)
        health = Health()
        health.add_disk(folder.path)
        health.add_certificates(deployment)
        positions = {node.name: answers.position(node.client) for node in enrolment.node}
        releases = {name: None if at is None else at.seq for name, at in positions.items()}
        record.write_page(releases, health.faults.values())
        if anchors is not None and (count := anchors.collect(row["round"])):
            record.say(f"{count} nodes have signed the head of round {row['round']}")

    def run() -> None:
        with folder.lock():  # the lock shows `fedlgm deploy run` that this process runs
            done = _settle_attempt(file, folder)
            # The nodes of a round that continues have been charged for it.
            if need := remaining_need(
                assembly, folder.path.name, done=done + (file.found is not None)
            ):
                nodes.require(need)
        serve(
            nodes, assembly, folder, "deployment", close_round, nodes=enrolled,
            attempt=file.key, continued=file.found is not None,
        )  # fmt: skip

    try:
        try:
            run()
        except LostAttempt as lost:
            record.say(str(lost))
            file.give_up()
            run()
        record.print_totals(assembly.privacy.facts.rounds)
    except DivergedError as error:
        said = ", ".join(f"{enrolment[client].name} ({norm:.3g})" for client, norm in error.largest)
        record.say(
            f"training diverged; norms of the largest contributions of its last round: {said}"
        )
        raise


def _settle_attempt(file: AttemptFile, folder: RunFolder) -> int:
    """Delete an attempt whose round is done, and return the number of rounds that are done.

    Raises:
        LostAttempt: the attempt is not at the next round, or the ledger has later rounds. Later
            rounds have the attempt's identity, so the run would release them again without a
            charge.
    """
    done, last = folder.checkpoints.rounds(), 0
    if file.found is not None and file.found.round <= done:  # killed before it was deleted
        file.give_up()
    if file.found is not None:
        if folder.ledger_file.is_file():
            with Ledger(folder.ledger_file) as ledger:
                last = ledger.rounds()
        if not last <= file.found.round == done + 1:
            raise LostAttempt(
                f"{ATTEMPT} is an attempt at round {file.found.round}, but {done} rounds are done "
                f"and {last} are charged: files were restored or removed; round {done + 1} begins "
                "again, and its nodes are charged once more"
            )
    return done


def _work_in(directory: str) -> None:
    """Change to the command's directory, in which a recipe's own modules and files are found.

    Raises:
        ConfigError: the ServerApp's user has no access.
    """
    try:
        os.chdir(directory)
    except OSError as error:
        what = (
            f"{directory}, where `fedlgm deploy run` was called, is closed to the user that runs "
            "ServerApps"
        )
        remedy = "call it in a folder that this user can enter"
        raise ConfigError(explain_failure(what, error, remedy)) from error


def _patience(recipe: Recipe) -> Patience:
    federation, deployment = recipe.federation, recipe.deployment or Deployment()
    shares = recipe.distributed
    return Patience(
        quorum=federation.quorum or 0.0
        if shares is None
        else shares.threshold / federation.clients,
        round_seconds=federation.round_timeout or 600.0,
        offline_seconds=deployment.offline_seconds,
        give_up_seconds=deployment.give_up_seconds,
        # the round of a secure sum has several short exchanges of messages
        poll_seconds=_POLL_S if shares is None else _POLL_S / 4,
    )
