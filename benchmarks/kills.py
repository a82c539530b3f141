"""Random processes of real deployments are killed, and each run must end as if none had been:
`python -m benchmarks.kills --kills 100`.

Six nodes on this machine, in turn under local, central and distributed trust. In each run one
process is killed (`kill -9`) at a random time: a node's service, its training process, SuperNode or
executor, the SuperLink or one of its processes, the signer, or the command that follows the run.
What the command then says is done: what has ended is started again (`deploy up`), and a command
that has ended without a result is repeated. The model must be that of the same recipe's simulation,
and every node's ledger must hold a row of each round. One line of JSON per kill.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from fedlgm_nodes.deploy import processes
from fedlgm_nodes.deploy.create import create
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from simulations import launch
from simulations.config import recipe as recipes
from simulations.engines.flower_processes import started_under

NODES, ROUNDS, SEED = 6, 3, 7
_SMALL = (
    f"federation.clients={NODES}", f"federation.rounds={ROUNDS}", "training.epochs=1",
    "federation.quorum=1.0", f"privacy.max_participations={ROUNDS}", f"run.seed={SEED}",
    "deployment.offline_seconds=10",
)  # fmt: skip
_RECIPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "local": ("nodes", ("model.hidden=[8]", "privacy.epsilon=1.0")),
    "central": (
        "nodes",
        (
            "model.hidden=[8]",
            "privacy.epsilon=1.0",
            "privacy.trust=central",
            "privacy.max_participations=none",
        ),
    ),
    "distributed": (
        "distributed-digits",
        (f"distributed.threshold={NODES}", "distributed.colluders=1", "privacy.epsilon=2.0"),
    ),
}
_LONGEST_S = 400.0  # of one command
_REPEATS = 3  # of it, until the run must have ended
_ADVICE = ("resumes", "continue", "deploy up", "again")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the exit status is 1 if a run ended otherwise than it must."""
    parser = argparse.ArgumentParser(prog="benchmarks.kills", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="number of kills, over all trusts")
    parser.add_argument("--trust", choices=[*_RECIPES], action="append", help="default: all three")
    parser.add_argument("--seed", type=int, default=0, help="seed of processes and times")
    options = parser.parse_args(arguments)
    trusts, bad = options.trust or [*_RECIPES], 0
    share, more = divmod(options.kills, len(trusts))
    for number, trust in enumerate(trusts):
        for outcome in kill(trust, share + (number < more), options.seed):
            bad += not outcome["right"]
            print(json.dumps(outcome), flush=True)
    return int(bad > 0)


def kill(trust: str, kills: int, seed: int) -> Iterator[dict[str, Any]]:
    """The outcomes of kills in one deployment of this trust."""
    name, settings = _RECIPES[trust]
    order = random.Random(f"{seed} {trust}")
    with tempfile.TemporaryDirectory(prefix="kills") as place:
        example = recipes.load(name, (*_SMALL, *settings))
        policy = {"trust": [trust], "epsilon": 1e4}
        folder = create(Path(place) / "lab", NODES, example=example, policy=policy, test_seed=SEED)
        try:
            processes.up(folder, _quietly)
            seconds = 30.0
            for number in range(kills):
                changed = [*_SMALL, *settings, f"model.seed={number + 1}"]
                started = time.monotonic()
                yield _outcome(folder, trust, name, changed, order, order.uniform(0.0, seconds))
                seconds = min(seconds, time.monotonic() - started)
        finally:
            processes.down(folder)


def _outcome(
    folder: DeploymentFolder,
    trust: str,
    recipe: str,
    settings: list[str],
    order: random.Random,
    after: float,
) -> dict[str, Any]:
    """One run in which a process is killed after some seconds."""
    processes.up(folder, _quietly)
    simulated = launch.simulate(
        recipes.load(recipe, settings),
        engine="local",
        run_dir=folder.path / "simulated" / settings[-1],
    )
    command = [sys.executable, "-m", "simulations.cli", "deploy", "run", recipe, str(folder.path)]
    command += ["--json", *(part for setting in settings for part in ("--set", setting))]
    outcome: dict[str, Any] = {"trust": trust, "after": round(after, 1), "said": [], "commands": 0}
    result = None
    while result is None and outcome["commands"] <= _REPEATS:
        outcome["commands"] += 1
        log = folder.path / "said"
        with log.open("w") as stderr:
            run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        try:
            if outcome["commands"] == 1:
                _kill_one(folder, run, order, after, outcome)
            out = _follow(folder, run, log, outcome["said"])
        except subprocess.TimeoutExpired:
            outcome["said"].append("it did not end")
            break
        finally:
            run.kill()
        if '{"' in out:
            result = json.loads(out[out.index('{"') :])
        elif run.returncode >= 0:  # it was not the process that was killed
            outcome["said"].append((log.read_text().strip().splitlines() or [""])[-1])
        if result is None:
            processes.up(folder, _quietly)
    told = all(any(word in line for word in _ADVICE) for line in outcome["said"])
    outcome["equal"] = result is not None and result["model_sha256"] == simulated["model_sha256"]
    outcome["charged"] = result is not None and _is_charged(folder, Path(result["run"]).name)
    outcome["right"] = outcome["equal"] and outcome["charged"] and told
    return outcome


def _follow(
    folder: DeploymentFolder, run: subprocess.Popen[str], log: Path, said: list[str]
) -> str:
    """The output of the command; what it says has ended is started again while it waits.

    Raises:
        TimeoutExpired: it does not end.
    """
    deadline = time.monotonic() + _LONGEST_S
    while True:
        try:
            return run.communicate(timeout=1.0)[0]
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                raise
        new = [line for line in log.read_text().splitlines() if "deploy up" in line]
        if set(new) - set(said):
            said[:] = dict.fromkeys([*said, *new])
            processes.up(folder, _quietly)


def _kill_one(
    folder: DeploymentFolder,
    run: subprocess.Popen[str],
    order: random.Random,
    after: float,
    outcome: dict[str, Any],
) -> None:
    """Kill one of the processes that there are after some seconds."""
    time.sleep(after)
    roles: dict[str, psutil.Process] = {"the command": psutil.Process(run.pid)}
    for role, process in processes._running(folder).items():
        roles[role] = process
        for child in process.children(recursive=True):
            roles.setdefault(f"{role}: {_program(child)}", child)
    for process in started_under(folder.flower_home):
        if process.pid not in {other.pid for other in roles.values()}:
            roles.setdefault(_program(process), process)
    victim = order.choice(sorted(roles))
    outcome["killed"] = victim
    try:
        roles[victim].kill()
    except psutil.NoSuchProcess:
        outcome["killed"] += " (it had ended)"


def _program(process: psutil.Process) -> str:
    """Name of a process's program or module."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return "ended"
    return next((Path(word).name for word in words[1:] if not word.startswith("-")), "process")


def _is_charged(folder: DeploymentFolder, run: str) -> bool:
    """Whether every node's ledger holds every round of a run."""
    for node in folder.settings().nodes:
        with folder.node(node.name).service.ledger(readonly=True) as ledger:
            rounds = Counter(row.round for row in ledger.rows() if row.run == run)
        if set(rounds) != set(range(1, ROUNDS + 1)):
            return False
    return True


def _quietly(line: str) -> None:
    """Print nothing."""


if __name__ == "__main__":
    sys.exit(main())
