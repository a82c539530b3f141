"""Running a recipe on a deployment: submit, follow, tell how it ended, and go on where it stopped."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import tomli_w

from fedlgm.errors import RunError
from simulations.config.recipe import Recipe
from simulations.deploy.flower_cli import Flower
from simulations.deploy.layout import CONNECTION, DeploymentFolder
from simulations.deploy.server_entry import TOLD, deployed
from simulations.engines.flower_command import reason
from simulations.runs.folder import RunFolder
from simulations.runs.rows import RunSummary
from strategies.node.enrolment import Enrolment

APP = Path(__file__).parent / "app"
_SILENCE_S, _LONGEST_S = 20.0, 30.0  # of a run, until Flower is asked what became of it; a question costs a second


def run(
    folder: DeploymentFolder, recipe: Recipe, *, fresh: bool = False, say: Callable[[str], None] = print
) -> RunSummary:
    """Run a recipe on a deployment and return its summary; the same recipe again goes on where it stopped.

    Args:
        folder: the deployment.
        recipe: what to run; its number of clients becomes that of the enrolled nodes.
        fresh: start a new run although there is one of this recipe.
        say: receives lines for people.

    Raises:
        ConfigError: what real nodes cannot do.
        DivergedError: a round's model is NaN or infinite.
        RunError: the SuperLink does not answer, or the run failed; the message ends with Flower's log.
    """
    flower, settings = Flower(folder), folder.settings()
    clients = len(Enrolment.load(folder.enrolment_file))
    if recipe.federation.clients != clients:
        say(f"federation.clients = {clients}: the enrolled nodes")
    if recipe.run.seed is not None and not settings.test:
        say("run.seed is left out: a deployed run has keys of its own")
    recipe = deployed(recipe, clients, test=settings.test)
    if not flower.healthy():
        raise RunError(
            f"the SuperLink at {settings.host}:{settings.port} does not answer: fedlgm deploy up {folder.path}"
        )
    target = _folder(folder, recipe, fresh)
    finished = target.result()
    if finished is not None:
        say(f"{target.path} is finished; --fresh starts another run")
        return finished
    if target.rows():
        say(f"continuing {target.path} after round {target.rows()[-1]['round']}")
    run_config = target.path / "flower.toml"
    run_config.write_text(tomli_w.dumps({"deployment": str(folder.path), "run-dir": str(target.path)}))
    seen = _size(target)
    run_id = str(flower.json("run", str(APP), CONNECTION, "--run-config", str(run_config))["run-id"])
    try:
        status = _follow(flower, run_id, target, seen, say)
    except BaseException:
        flower.text("stop", run_id, CONNECTION)
        say("stopped; the same command goes on from here")
        raise
    result = target.result()
    if status != "finished:completed" or result is None:
        diverged = target.diverged.read()
        if diverged is not None:
            raise diverged
        raise RunError(f"Flower reports {status}. {_reason(flower.text('log', run_id, CONNECTION, '--show'))}")
    return result


def _folder(folder: DeploymentFolder, recipe: Recipe, fresh: bool) -> RunFolder:
    """The run folder of this recipe: the latest one, or a new one."""
    digest = hashlib.sha256(recipe.to_toml().encode()).hexdigest()[:8]
    stem = f"{recipe.name}-{digest}"
    folder.runs.mkdir(mode=0o700, exist_ok=True)
    present = sorted(path for path in folder.runs.glob(f"{stem}-*") if RunFolder(path).recipe_file.is_file())
    if present and not fresh:
        return RunFolder.open(present[-1])
    return RunFolder.create(folder.runs / f"{stem}-{len(present) + 1:03d}", recipe)


def _follow(flower: Flower, run_id: str, target: RunFolder, seen: int, say: Callable[[str], None]) -> str:
    """Pass on the run's lines until it has ended; returns Flower's status."""
    asked, silence = time.monotonic(), _SILENCE_S
    while True:
        time.sleep(0.25)
        now = _size(target)
        if now > seen:
            with _told(target).open(encoding="utf-8", errors="replace") as file:
                file.seek(seen)
                for line in file.read(now - seen).splitlines():
                    say(line)
            seen, asked, silence = now, time.monotonic(), _SILENCE_S
        ended = target.result() is not None
        if time.monotonic() - asked > (0.5 if ended else silence):
            runs = flower.json("list", CONNECTION, "--run-id", run_id)["runs"]
            status, asked, silence = str(runs[0]["status"]), time.monotonic(), min(2 * silence, _LONGEST_S)
            if status.startswith("finished"):
                return status


def _size(target: RunFolder) -> int:
    file = _told(target)
    return file.stat().st_size if file.is_file() else 0


def _told(target: RunFolder) -> Path:
    """Where the run's lines for people are."""
    return target.diagnostics_file.with_name(TOLD)


def _reason(log: str) -> str:
    """The error of ours that ended a ServerApp, or what else its log says."""
    for line in reversed(log.strip().splitlines()):
        name, _, message = line.strip().partition(": ")
        if name.startswith("fedlgm.errors.") and message:
            return message
    return reason(log)
