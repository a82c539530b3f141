"""Kills of random processes of a real deployment, after which each run must end as if no process
had been killed: `python -m benchmarks.kills --kills 100 --out docs/results/kills.jsonl`.

Nodes on this machine, six by default, answer runs under local, central and distributed trust in
turn. In each run one process is killed (`kill -9`) at a random time of a random round: a service, a
training process, a SuperNode, an executor, the SuperLink or one of its processes, the signer, or
the command that follows the run. The benchmark then does what the command's messages advise: it
starts the processes that have ended (`deploy up`, after `deploy down` if the advice says so), and
it repeats a command that has ended without a result. The final model must equal the model of the
same recipe's simulation. Every answer that a node has sent must have a row in the node's ledger.
The answers are read from the log of the node's service and from the server's records.

The benchmark prints one line of JSON for each kill, and finally a table of all kills. A later call
with the same --out continues after the last kill.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from fedlgm.files import write_durably
from fedlgm_nodes.deploy import process_faults, process_record, processes
from fedlgm_nodes.deploy.create import create
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.server_entry import REPORT
from simulations import cli, launch
from simulations.config import recipe as recipes
from simulations.engines.flower_processes import started_under

ROUNDS, SEED = 3, 7
_SMALL = (
    "federation.clients={nodes}", f"federation.rounds={ROUNDS}", "training.epochs=1",
    "federation.quorum=1.0", f"privacy.max_participations={ROUNDS}", f"run.seed={SEED}",
    "deployment.offline_seconds=10",
)  # fmt: skip
_OF_NODES = ("model.hidden=[8]", "privacy.epsilon=1.0")
_RECIPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "local": ("nodes", _OF_NODES),
    "central": (
        "nodes",
        (*_OF_NODES, "privacy.trust=central", "privacy.max_participations=none"),
    ),
    "distributed": (
        "distributed-digits",
        ("distributed.threshold={nodes}", "distributed.colluders=1", "privacy.epsilon=2.0"),
    ),
}
# longest time until the first round ends, and longest time of each later round
_START_S, _ROUND_S = 12.0, 4.0
_LONGEST_S = 400.0  # longest time of one command
_REPEATS = 5  # most repeats of a command, by which the run must have ended
_WAIT = "wait for it"  # a command's advice while another process works on the run
_WAIT_S = 10.0
_ADVICE = ("resumes", "continue", "deploy up", "again", _WAIT)
_NAMES = {
    "fedlgm_nodes.service.training_process": "training process",
    "fedlgm_nodes.service.accounting_process": "accounting process", "supernode": "SuperNode",
    "superlink": "SuperLink", "flower-superexec": "SuperLink's `flower-superexec`",
    "flwr-serverapp": "run's server process", "command": "`deploy run`", "flwr": "`flwr` of `deploy run`",
}  # fmt: skip
_RELEASE = re.compile(r"round (\d+) of run '(.+)': (?:new|again) release (\d+),")
_fork = multiprocessing.get_context("fork")  # a forked command spends no time on its imports


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 if a run did not end as it must."""
    parser = argparse.ArgumentParser(prog="benchmarks.kills", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="number of kills, over all trusts")
    parser.add_argument("--trust", choices=[*_RECIPES], action="append", help="default: all three")
    parser.add_argument("--nodes", type=int, default=6, help="number of nodes")
    parser.add_argument("--seed", type=int, default=0, help="seed of processes and times")
    parser.add_argument("--out", type=Path, help="file of the outcomes; the call continues it")
    options = parser.parse_args(arguments)
    out: Path | None = options.out
    known = [] if out is None or not out.is_file() else out.read_text().splitlines()
    outcomes: list[dict[str, Any]] = [json.loads(line) for line in known]
    if any(outcome["seed"] != options.seed for outcome in outcomes):
        parser.error(f"--seed: {out} has the outcomes of another seed")
    numbers = range(len(outcomes), options.kills)
    print(f"seed {options.seed}, kills {numbers.start} to {numbers.stop - 1}", flush=True)
    torch.set_num_threads(1)  # forked processes share no pool of threads
    trusts = options.trust or [*_RECIPES]
    for outcome in kill(trusts, numbers, options.nodes, options.seed) if numbers else ():
        outcomes.append(outcome)
        print(json.dumps(outcome), flush=True)
        if out is not None:
            write_durably(out, "".join(f"{json.dumps(one)}\n" for one in outcomes).encode(), 0o644)
    print(table(outcomes))
    return int(not all(outcome["right"] for outcome in outcomes))


def table(outcomes: Sequence[dict[str, Any]]) -> str:
    """Return a table of the outcomes by killed process, for a page."""
    by_process: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for outcome in outcomes:
        by_process[_NAMES.get(outcome["process"], outcome["process"])].append(outcome)
    lines = [
        (
            "| killed process | local, central, distributed | ended in the undisturbed model | "
            "every message said what to do | answers sent | without a row |"
        ),
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, group in (*sorted(by_process.items()), ("all", list(outcomes))):
        trusts = ", ".join(str(sum(one["trust"] == trust for one in group)) for trust in _RECIPES)
        equal = sum(one["end"] == "model" for one in group)
        advised = sum(_is_advice(one["says"]) for one in group)
        sent, uncharged = (sum(one[key] for one in group) for key in ("answers", "uncharged"))
        lines.append(f"| {name} | {trusts} | {equal} | {advised} | {sent} | {uncharged} |")
    return "\n".join(lines)


def kill(trusts: Sequence[str], numbers: range, nodes: int, seed: int) -> Iterator[dict[str, Any]]:
    """Kill processes in one deployment, whose nodes answer runs under these trust models in turn;
    yield the outcome of each kill.
    """
    place = Path(tempfile.mkdtemp(prefix="kills"))
    policy = {"trust": [*trusts], "epsilon": 1e4}
    example = recipes.load("nodes", _settings(_OF_NODES, nodes))
    folder = create(place / "lab", nodes, example=example, policy=policy, test_seed=SEED)
    try:
        processes.up(folder, _quietly)
        for number in numbers:
            trust, order = trusts[number % len(trusts)], random.Random(f"{seed} {number}")
            _start_ended(folder)
            outcome = {"kill": number, "seed": seed, "trust": trust}
            yield outcome | _Run(folder, trust, number, nodes).outcome(order)
    finally:
        processes.down(folder)
        shutil.rmtree(place)


def _settings(own: Sequence[str], nodes: int) -> list[str]:
    return [value.format(nodes=nodes) for value in (*_SMALL, *own)]


class _Run:
    """One run in which a process is killed at a random time."""

    def __init__(self, folder: DeploymentFolder, trust: str, number: int, nodes: int) -> None:
        self._folder, self._number = folder, number
        name, own = _RECIPES[trust]
        # Each run has a different model, because nodes do not store all of their answers to an
        # earlier run.
        settings = [*_settings(own, nodes), f"model.seed={number + 1}"]
        self._recipe = recipes.load(name, settings)
        self._command = ["deploy", "run", name, str(folder.path), "--json"]
        self._command += [part for setting in settings for part in ("--set", setting)]
        self._out, self._log = folder.path / "result", folder.path / "said"
        self._said: list[str] = []

    def outcome(self, order: random.Random) -> dict[str, Any]:
        """Return what was killed and when, and how the run ended."""
        started = time.monotonic()
        before = set(self._folder.runs.glob("*"))
        found: dict[str, Any] = {}
        result, commands = None, 0
        while result is None and commands <= _REPEATS:
            commands += 1
            for file in (self._out, self._log):
                file.write_text("")
            run = _fork.Process(target=_call, args=(self._command, self._out, self._log))
            run.start()
            try:
                if commands == 1:
                    found = self._kill_one(run, order)
                self._follow(run)
            finally:
                run.kill()
                run.join()
            out = self._out.read_text()
            printed = json.loads(out[out.index("{") :]) if "{" in out else {}
            if "model_sha256" in printed:
                result = printed
            elif run.exitcode is not None and run.exitcode >= 0:  # another process was killed
                lines = ["", *self._lines()]
                errors = [line for line in lines if line.startswith("error: ")]
                self._said.append((errors or lines)[-1])  # a log may follow the error
            if result is None:
                if "deploy down" in "".join(self._said[-1:]):
                    processes.down(self._folder)
                    processes.up(self._folder, _quietly)
                _start_ended(self._folder)
                time.sleep(_WAIT_S * any(_WAIT in line for line in self._said[-1:]))
        seconds = round(time.monotonic() - started, 1)
        runs = set(self._folder.runs.glob("*")) - before
        charged = charges(self._folder, next(iter(runs), Path("none")))
        simulated = launch.simulate(
            self._recipe,
            engine="local",
            run_dir=self._folder.path / "simulated" / str(self._number),
        )
        said = [line.replace(str(self._folder.path), "lab") for line in self._said]
        equal = result is not None and result["model_sha256"] == simulated["model_sha256"]
        right = equal and _is_advice(said) and charged["uncharged"] == 0
        return {
            **found, "end": "model" if equal else "no result" if result is None else "other model",
            "says": said, "commands": commands, **charged, "seconds": seconds, "right": right,
        }  # fmt: skip

    def _kill_one(self, run: Any, order: random.Random) -> dict[str, Any]:
        """Kill a random running process; every kind of process is equally likely."""
        stage = order.randrange(ROUNDS)
        while run.is_alive() and sum(line.startswith("round ") for line in self._lines()) < stage:
            time.sleep(0.1)
        after = order.uniform(0.0, _ROUND_S if stage else _START_S)
        time.sleep(after)
        kinds: dict[str, list[psutil.Process]] = defaultdict(list)
        if run.is_alive():
            kinds["command"].append(psutil.Process(run.pid))
        roles = process_record.running(self._folder)
        for role, process in roles.items():
            kind = re.sub(r"^node\d+-", "", role)
            kinds[kind].append(process)
            for child in process.children(recursive=True):
                kinds[_program(child)].append(child)
        known = {process.pid for group in kinds.values() for process in group}
        for process in started_under(self._folder.flower_home):
            if process.pid not in known:
                kinds[_program(process)].append(process)
        lines = self._lines()
        kinds.pop("", None)  # processes that have ended meanwhile
        kind = order.choice(sorted(kinds))
        victim = order.choice(sorted(kinds[kind], key=lambda process: process.pid))
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            kind = f"{kind} (it had ended)"
        seen = lines[-1] if lines else "nothing"
        return {
            "process": kind,
            "after": round(after, 1),
            "seen": seen,
            "during": "command" in kinds,
        }

    def _follow(self, run: Any) -> None:
        """Wait for the end of the command, and restart the processes that it reports as ended."""
        deadline = time.monotonic() + _LONGEST_S
        while run.is_alive() and time.monotonic() < deadline:
            run.join(0.5)
            lines = [line for line in self._lines() if "deploy up" in line]
            if not run.is_alive():  # the last line then comes from the command itself
                return
            if new := [line for line in lines if line not in self._said]:
                self._said += new
                processes.up(self._folder, _quietly)
        if run.is_alive():
            self._said.append("it did not end")

    def _lines(self) -> list[str]:
        """Return the lines that the command has printed."""
        return self._log.read_text().strip().splitlines()


def charges(folder: DeploymentFolder, run: Path) -> dict[str, int]:
    """Count a run's rows in all ledgers, the answers that were sent for it, and the answers without
    a row.

    Args:
        folder: the deployment.
        run: folder of the run.
    """
    report, known = run / "private" / REPORT, folder.positions_file
    lines = report.read_text().splitlines() if report.is_file() else []
    accepted = [json.loads(line) for line in lines]
    positions = json.loads(known.read_text()) if known.is_file() else {}
    rows = sent = uncharged = 0
    for client, node in enumerate(folder.settings().nodes):
        with folder.node(node.name).service.ledger(readonly=True) as ledger:
            of_run = {(row.round, row.seq) for row in ledger.rows() if row.run == run.name}
            if signed := positions.get(str(client)):
                uncharged += ledger.head_at(signed["seq"]) != signed["head"]
        log = (folder.logs / f"{node.name}-service.log").read_text(errors="replace")
        answers = [
            (int(round), int(seq)) for round, name, seq in _RELEASE.findall(log) if name == run.name
        ]
        rounds = {round for round, _ in of_run}
        uncharged += sum(answer not in of_run for answer in answers)
        uncharged += sum(
            entry["round"] not in rounds for entry in accepted if node.name in entry["answered"]
        )
        rows, sent = rows + len(of_run), sent + len(answers)
    return {"rows": rows, "answers": sent, "uncharged": uncharged}


def _is_advice(said: Sequence[str]) -> bool:
    """Return whether every message contains some advice from `_ADVICE`."""
    return all(any(word in line for word in _ADVICE) for line in said)


def _start_ended(folder: DeploymentFolder) -> None:
    """Start the processes that have ended, if any.

    `up` is called only then, because it asks for seconds whether all nodes are connected.
    """
    if process_faults.faults(folder):
        processes.up(folder, _quietly)


def _call(command: list[str], out: Path, log: Path) -> None:
    """Run the command; this function is called in a separate process."""
    for number, file in ((1, out), (2, log)):
        os.dup2(os.open(file, os.O_WRONLY), number)
    sys.argv = ["fedlgm", *command]
    cli.main()


def _program(process: psutil.Process) -> str:
    """Return the name of a process's program or module; empty if the process has ended."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return ""
    return next((Path(word).name for word in words[1:] if not word.startswith("-")), "process")


def _quietly(line: str) -> None:
    """Print nothing."""


if __name__ == "__main__":
    sys.exit(main())
