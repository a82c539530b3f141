"""Runs of a recipe on a deployment: submission, progress, outcome, and continuation after an
interruption.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from fedlgm.errors import RunError
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.flower_cli import Flower
from fedlgm_nodes.deploy.process_faults import faults
from fedlgm_nodes.deploy.registration import Registration, number, registered_runs
from fedlgm_nodes.deploy.server_entry import (
    ENDED,
    TOLD,
    DeployedAssembly,
    recipe_for_nodes,
    work_of,
)
from fedlgm_nodes.deploy.watch import RESUMES, KilledError, Watch, killed_message
from fedlgm_nodes.server.enrolment import Enrolment
from fedlgm_nodes.server.questions import unused_at
from simulations.config.recipe import Recipe
from simulations.engines.flower import require_summary
from simulations.engines.flower_command import (
    COMPLETED,
    CONNECTION,
    config_file,
    first_exception,
    reason,
)
from simulations.runs import new_folder
from simulations.runs.folder import RunFolder
from simulations.runs.rows import RunSummary

APP = Path(__file__).parent / "app"
# seconds of silence after which Flower is asked for a run's status; asking takes a second
_SILENCE_S, _LONGEST_S = 20.0, 30.0
# seconds after which the run must have a process; SuperExec looks for tasks every second
_START_S = 2.5


def run(
    folder: DeploymentFolder,
    recipe: Recipe,
    *,
    fresh: bool = False,
    say: Callable[[str], None] = print,
) -> RunSummary:
    """Run a recipe on a deployment and return its summary. If the last run of the same recipe was
    interrupted, continue it.

    Args:
        folder: the deployment.
        recipe: the recipe; its number of clients becomes the number of enrolled nodes.
        fresh: start a new run even if there is one of this recipe.
        say: called with each line of progress.

    Raises:
        ConfigError: real nodes do not support a setting.
        DivergedError: a round's model is NaN or infinite.
        KilledError: a process without which the run cannot continue has ended.
        RunError: the SuperLink does not answer, or the run failed; the message ends with Flower's
            log.
    """
    flower, settings = Flower(folder), folder.settings()
    watch = Watch(folder, say)
    clients = len(Enrolment.load(folder.enrolment_file))
    if recipe.federation.clients != clients:
        say(f"federation.clients = {clients}: the number of enrolled nodes")
    if recipe.run.seed is not None and not settings.test:
        say("run.seed is ignored: a deployed run draws its own keys")
    recipe = recipe_for_nodes(recipe, clients, test=settings.test)
    assembly = DeployedAssembly(recipe)
    assembly.privacy.first_plan()  # refuses now what cannot be found or built
    assembly.model.server_optimizer()
    if not flower.healthy():
        start = f"start it with fedlgm deploy up {folder.path}"
        why = faults(folder).get("superlink", start)
        raise RunError(f"the SuperLink at {settings.local} does not answer: {why}")
    target = _folder(folder, recipe, fresh)
    _follow_worker(target, say)
    finished = target.result()
    if finished is not None:
        say(f"{target.path} is finished; --fresh starts another run")
        return target.verified_result()
    with target.lock():  # the ServerApp of a killed command, for example, may still hold the lock
        pass
    if target.rows():
        say(f"continuing {target.path} after round {target.rows()[-1]['round']}")
    try:
        with new_folder.removed_if_refused(target, asks_nodes=True):
            return _submit_and_follow(flower, folder, target, recipe, say, watch)
    finally:
        if not target.path.exists() and os.access(folder.signer.runs, os.W_OK):
            (folder.signer.runs / f"{target.path.name}.json").unlink(missing_ok=True)


def _submit_and_follow(
    flower: Flower,
    folder: DeploymentFolder,
    target: RunFolder,
    recipe: Recipe,
    say: Callable[[str], None],
    watch: Watch,
) -> RunSummary:
    if os.access(folder.signer.runs, os.W_OK):  # otherwise the signer's user has registered the run
        _registration_of(recipe, folder).save(folder.signer.runs, target.path.name)
    here = {
        "deployment": str(folder.path),
        "run-dir": str(target.path),
        "directory": str(Path.cwd()),
    }
    (target.private / ENDED).unlink(missing_ok=True)
    seen = _size(target)
    watch.target, flower.meanwhile = target, watch.look
    run_id = flower.submit(APP, "--run-config", config_file(target.path / "flower.toml", here))
    try:
        status = _follow(flower, run_id, target, seen, say, watch)
    except KilledError:
        flower.start_detached("stop", run_id, CONNECTION)
        raise
    except BaseException:
        with suppress(KilledError):
            flower.text("stop", run_id, CONNECTION)
        say(f"stopped; {RESUMES}")
        raise
    return require_summary(target, status, lambda: _reason(status, flower.log(run_id)))


def register(folder: DeploymentFolder, recipe: Recipe, *, fresh: bool = False) -> str:
    """Register a recipe's run with the signer and return the run's name.

    This is for deployments whose signer belongs to another user; otherwise `run` registers its
    runs.

    Args:
        folder: the deployment.
        recipe: the recipe to run.
        fresh: register a new run even if there is one of this recipe.

    Raises:
        ConfigError: real nodes do not support a setting.
    """
    recipe = recipe_for_nodes(
        recipe, len(Enrolment.load(folder.enrolment_file)), test=folder.settings().test
    )
    stem = _stem(recipe)
    present = registered_runs(folder.signer.runs, stem)
    run = present[-1] if present and not fresh else _next_name(stem, present)
    _registration_of(recipe, folder).save(folder.signer.runs, run)
    return run


def _stem(recipe: Recipe) -> str:
    digest = hashlib.sha256(recipe.to_toml().encode()).hexdigest()[:8]
    return f"{re.sub('[^A-Za-z0-9._-]+', '-', recipe.name).lstrip('.-') or 'run'}-{digest}"


def _next_name(stem: str, present: Iterable[str]) -> str:
    """Name of a recipe's next run. Its number is above the numbers of all runs that are present,
    and is not used for another run.
    """
    return f"{stem}-{max(map(number, present), default=0) + 1:03d}"


def _folder(folder: DeploymentFolder, recipe: Recipe, fresh: bool) -> RunFolder:
    """The run folder of this recipe: the latest folder, or a new one."""
    stem = _stem(recipe)
    folder.runs.mkdir(mode=0o700, exist_ok=True)
    present = sorted(
        (path.parent.name for path in folder.runs.glob(f"{stem}-*/recipe.toml")), key=number
    )
    if present and not fresh:
        return RunFolder.open(folder.runs / present[-1])
    return new_folder.create(folder.runs / _new(folder, stem, present, fresh), recipe)


def _new(folder: DeploymentFolder, stem: str, present: list[str], fresh: bool) -> str:
    """Name of a new run. If another user registers runs, this is the newest registered run that has
    not begun.

    Raises:
        RunError: no such run is registered, or the signer does not answer.
    """
    if os.access(folder.signer.runs, os.W_OK):
        runs = registered_runs(folder.signer.runs, stem)
        return runs[-1] if runs and not fresh else _next_name(stem, [*runs, *present])
    waiting = [run for run in unused_at(folder.signer.socket, stem) if run not in present]
    if not waiting:
        raise RunError(
            "a new run of this recipe is not registered; as the signer's user, with the same "
            "--set: fedlgm deploy register RECIPE DIR --fresh"
        )
    return waiting[-1]


def _follow(
    flower: Flower,
    run_id: str,
    target: RunFolder,
    seen: int,
    say: Callable[[str], None],
    watch: Watch,
) -> str:
    """Pass on the run's lines until the run has ended. Returns Flower's status, or the ServerApp's
    own statement that it has completed the run.

    Raises:
        KilledError: see `Watch`; Flower itself notices it after a minute or more.
    """

    def pass_on() -> bool:
        """Pass on new lines, and return whether there were any."""
        nonlocal seen
        before, seen = seen, _pass_on(target, seen, say)
        return seen > before

    asked, silence, status = time.monotonic(), _SILENCE_S, ""
    while not status.startswith("finished"):
        time.sleep(0.25)
        if pass_on():
            asked, silence = time.monotonic(), _SILENCE_S
        watch.look()
        ended = (file := target.private / ENDED).exists()
        if ended and file.read_text() == f"{COMPLETED}\n":  # asking Flower takes a second
            status = COMPLETED
        elif time.monotonic() - asked > (
            0.5 if ended else _START_S if watch.misses_app else silence
        ):
            status, asked, silence = (
                flower.status(run_id),
                time.monotonic(),
                min(2 * silence, _LONGEST_S),
            )
            if not ended and not status.startswith(("pending", "finished")):
                watch.require_app()
    pass_on()  # lines that were printed while Flower was asked
    return status


def _follow_worker(target: RunFolder, say: Callable[[str], None]) -> None:
    """Pass on the lines of a server process that works on the run already, until it ends."""
    worker, seen = target.worker(), _size(target)
    if worker is not None and worker.runs:
        say(
            f"process {worker.pid} works on {target.path}, perhaps for a command that was killed: "
            "this command follows it"
        )
    while worker is not None and worker.runs:
        seen = _pass_on(target, seen, say)
        time.sleep(0.25)
        worker = target.worker()
    _pass_on(target, seen, say)


def _pass_on(target: RunFolder, seen: int, say: Callable[[str], None]) -> int:
    """Pass on the run's lines after the first `seen` bytes, and return the number of bytes."""
    size = _size(target)
    if size > seen:
        with _progress_file(target).open(encoding="utf-8", errors="replace") as file:
            file.seek(seen)
            for line in file.read(size - seen).splitlines():
                say(line)
    return size


def _size(target: RunFolder) -> int:
    file = _progress_file(target)
    return file.stat().st_size if file.is_file() else 0


def _progress_file(target: RunFolder) -> Path:
    """File of the run's progress lines."""
    return target.private / TOLD


def _reason(status: str, log: str) -> str:
    """The reason why a ServerApp ended: the fedlgm error, or an error of another kind, or a
    sentence that its log shows no error.
    """
    for line in reversed(log.strip().splitlines()):
        name, _, message = line.strip().partition(": ")
        if name.startswith("fedlgm.errors.") and message:
            return message
    if first_exception(log) is None:
        return f"{killed_message(None)} (Flower reports {status}). {reason(log)}"
    return f"Flower reports {status}. {reason(log)}"


def _registration_of(recipe: Recipe, folder: DeploymentFolder) -> Registration:
    """The registration of a recipe as a deployment runs it (see `recipe_for_nodes`).

    Raises:
        ConfigError: the recipe cannot be run.
    """
    assembly = DeployedAssembly(recipe)
    plan, method = assembly.privacy.first_plan(), assembly.privacy.method
    costs = method.mechanism.costs(method.layers, method.facts.rounds)
    return Registration(
        work=work_of(recipe),
        clients=Enrolment.load(folder.enrolment_file).clients[-1] + 1,
        facts=method.facts.to_dict(),
        family=plan.family,
        bounded_by=plan.bounded_by,
        layers=dict(zip(method.layers.names, map(int, method.layers.sizes), strict=True)),
        multipliers=[method.facts.noise_multiplier / math.sqrt(cost) for cost in costs],
    )
