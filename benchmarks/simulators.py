"""Simulators side by side on the same work: `python -m benchmarks.simulators --json [--quick]`.

"ours" is the recipe as its users get it. Each contender runs in a separate process and makes one
round on demand, so that rounds alternate between contenders and a change of the machine's speed
affects all equally. The medians and their ratios to ours are printed as one JSON object. pfl takes
part if the interpreter named by FEDLGM_PFL_PYTHON has `pfl`, torch, flwr-datasets and NumPy: it
then has two processes, each with half of the cohort. They never exchange anything, because an
exchange needs Horovod or MPI, so pfl is faster here than it would be with an exchange.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.contenders import work
from fedlgm import data
from fedlgm.errors import DataError
from fedlgm.training import native

CONTENDERS = {
    "ours": ["ours"],
    "ours, torch": ["ours", "torch"],
    "ours, ray": ["ours", "ray"],
    "flower": ["flower"],
    "bare": ["bare"],
}


class Contender:
    """Child processes that together run one round for every line of input.

    Args:
        command: arguments after `python -m benchmarks.contenders.`, one list per process.
        python: interpreter.
        environment: environment variables in addition to those of this process.
    """

    def __init__(
        self,
        *commands: list[str],
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        started = time.perf_counter()
        self._processes = [
            subprocess.Popen(
                [python, "-m", f"benchmarks.contenders.{command[0]}", *command[1:]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | dict(environment or {}),
            )
            for command in commands
        ]
        self._answers()
        self.start_to_first_round = time.perf_counter() - started

    def round(self, number: int) -> dict[str, float]:
        """Run a round; return the answer of the slowest process, which includes its "seconds"."""
        for process in self._processes:
            print(number, file=process.stdin, flush=True)
        return max(self._answers(), key=lambda answer: float(answer["seconds"]))

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=60)

    def _answers(self) -> list[dict[str, Any]]:
        return [_answer(process) for process in self._processes]


def interleaved(
    contenders: dict[str, Contender], rounds: int, warm: int = 0
) -> dict[str, list[dict[str, float]]]:
    """Run rounds 1 to `rounds` of every contender in turn, and then close the contenders.

    Args:
        contenders: contenders by name.
        rounds: measured rounds of each.
        warm: number of rounds before each measured round. They do not count. They are for
            contenders whose memory the machine reclaims during the turns of other contenders.
    """
    answers: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for number in range(1, rounds + 1):
        for name, contender in contenders.items():
            for _ in range(warm):
                contender.round(number)
            answers[name].append(contender.round(number))
    for contender in contenders.values():
        contender.close()
    return answers


def starts(makers: dict[str, Callable[[], Contender]], times: int) -> dict[str, list[float]]:
    """Measure the seconds from a contender's start to the end of its first round, for `times`
    starts of each.

    The contenders alternate, and every second turn reverses their order.

    The very first start also reads the files that all contenders need from the disk.
    """
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    for turn in range(times):
        for name in list(makers)[:: -1 if turn % 2 else 1]:
            contender = makers[name]()
            seconds[name].append(contender.start_to_first_round)
            contender.close()
    return seconds


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            answer: dict[str, Any] = json.loads(line)
            return answer
    raise RuntimeError(f"{process.args} ended with status {process.wait()}")


def floor_seconds(rounds: Iterable[int]) -> dict[str, float]:
    """Return a round's floating-point operations divided by the measured rate of matrix products of
    all cores.
    """
    module = work.model()
    x, y = torch.randn(work.BATCH, 1, 28, 28), torch.zeros(work.BATCH, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.cross_entropy(module(x), y).backward()
    per_example = counter.get_total_flops() / work.BATCH
    examples = statistics.mean(
        work.EPOCHS * int(work.clients().sizes[work.cohort(r)].sum()) for r in rounds
    )
    a = torch.randn(1024, 1024)
    times = []
    for _ in range(20):
        started = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - started)
    rate = 2 * 1024**3 / statistics.median(times)
    return {
        "flops_per_round": per_example * examples,
        "flops_per_second": rate,
        "seconds": per_example * examples / rate,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json", action="store_true", help="print JSON (always done; kept for symmetry)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds; ends within three minutes"
    )
    parser.add_argument("--rounds", type=int, help="timed rounds of each contender")
    parser.add_argument(
        "--starts", type=int, help="timed starts of each contender, one of them for its rounds"
    )
    arguments = parser.parse_args()
    try:
        data.load("fashion-mnist")
    except DataError as error:
        sys.exit(f"the benchmark trains on FashionMNIST: {error}")
    rounds = arguments.rounds or (4 if arguments.quick else 15)
    missing = native.reason()  # compiles it, once on a machine
    if missing:
        print(f"ours trains with PyTorch: {missing}", file=sys.stderr)
    makers = {name: partial(Contender, command) for name, command in CONTENDERS.items()}
    pfl_python = os.environ.get("FEDLGM_PFL_PYTHON")
    if pfl_python:
        shares = [["pfl_simulator", str(share)] for share in range(work.WORKERS)]
        makers["pfl"] = partial(Contender, *shares, python=pfl_python)
    else:
        print(
            "pfl does not take part: FEDLGM_PFL_PYTHON names no interpreter with pfl, torch and "
            "flwr-datasets",
            file=sys.stderr,
        )
    started = starts(makers, (arguments.starts or (1 if arguments.quick else 3)) - 1)
    contenders = {name: make() for name, make in makers.items()}
    for name, contender in contenders.items():
        started[name].append(contender.start_to_first_round)
    answers = interleaved(contenders, rounds)
    times = {name: [answer["seconds"] for answer in rows] for name, rows in answers.items()}
    floor = floor_seconds(range(1, rounds + 1))
    medians = {name: statistics.median(values) for name, values in times.items()} | {
        "floor": floor["seconds"]
    }
    result = {
        "work": f"FashionMNIST, {work.CLIENTS} clients, {work.COHORT} a round, CNN 26,010, "
        f"{work.EPOCHS} epochs, batch {work.BATCH}, Adam {work.LR}, {work.WORKERS} workers",
        "rounds": rounds,
        "seconds_per_round": {"pfl": None} | medians,
        "all_seconds": times,
        "ratios": {"pfl": None}
        | {name: s / medians["ours"] for name, s in medians.items() if name != "ours"},
        "start_to_first_round": {
            name: statistics.median(seconds) for name, seconds in started.items()
        },
        "all_starts": started,
        "floor": floor,
        "machine": {
            "cores": os.cpu_count(),
            "processor": platform.processor() or platform.machine(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "training_kernel": native.instruction_set() if missing is None else None,
        },
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
