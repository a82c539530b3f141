"""Forked workers: the same bits as in one process, whatever dies, and nothing left behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from patience import LIMIT_S, wait_until

from fedlgm import wire
from fedlgm.errors import ConfigError, MemoryWarning, PrivacyError, RunError
from fedlgm.noise.keys import KeyRing
from simulations import engines, launch
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.recipe import Recipe
from simulations.engines import processes
from simulations.engines.base import EngineOptions
from simulations.engines.processes import ProcessGrid
from simulations.runs.folder import RunFolder

OVERRIDES = [
    "federation.clients=20",
    "federation.rounds=3",
    "federation.rate=0.6",
    "federation.dropout=0.2",
    "mechanism.clip=med",
    "mechanism.norms=quantile",
    "privacy.accountant=rdp",
    "run.block_size=2",
    "run.evaluate_every=3",
]
RECIPE = recipes.load("digits", OVERRIDES)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return launch.simulate(RECIPE, engine="local", run_dir=tmp_path_factory.mktemp("local") / "run")  # type: ignore[return-value]


def family(pid: int | None = None) -> list[psutil.Process]:
    """Everything below a process that lives."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # some end meanwhile
                found += [child] if child.status() != psutil.STATUS_ZOMBIE else []
    return found


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = set(family())
    yield
    assert set(family()) <= before


SAME = ("model_sha256", "ledger_head", "accuracy", "epsilon")


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_gives_the_same_bits(
    reference: dict[str, Any], tmp_path: Path, workers: int
) -> None:
    result = launch.simulate(RECIPE, engine="processes", workers=workers, run_dir=tmp_path / "run")
    assert result["engine"] == "processes"
    assert [result[name] for name in SAME] == [reference[name] for name in SAME]  # type: ignore[literal-required]


def test_clients_that_add_their_own_noise_do_so_with_the_same_bits(tmp_path: Path) -> None:
    local = [
        "federation.rounds=2",
        "privacy.trust=local",
        "privacy.max_participations=2",
        "privacy.accountant=rdp",
    ]
    recipe = recipes.load("digits", local)
    one, other = (
        launch.simulate(recipe, engine=engine, workers=2, run_dir=tmp_path / engine)
        for engine in ("local", "processes")
    )
    assert [one[name] for name in SAME] == [other[name] for name in SAME]  # type: ignore[literal-required]


def test_killed_workers_are_replaced(
    reference: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    ask = ProcessGrid._ask

    def asked(self: ProcessGrid, message: Message) -> int | None:
        number = ask(self, message)
        if len(killed) < 4 and number is not None and number % 3 == 1:
            for victim in family(self._parent._pid)[
                :1
            ]:  # none where the next one is not forked yet
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.kill()
                    killed.append(victim.pid)
        return number

    monkeypatch.setattr(ProcessGrid, "_ask", asked)
    result = launch.simulate(RECIPE, engine="processes", workers=2, run_dir=tmp_path / "run")
    assert len(killed) >= 2
    assert result["model_sha256"] == reference["model_sha256"]
    assert result["ledger_head"] == reference["ledger_head"]


def test_a_killed_parent_ends_the_run_in_one_message(
    reference: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ProcessGrid._ask

    def asked(self: ProcessGrid, message: Message) -> int | None:
        number = ask(self, message)
        parent = psutil.Process(self._parent._pid)
        if number == 9 and parent.status() != psutil.STATUS_ZOMBIE:  # in the second round
            workers = parent.children()
            parent.kill()
            assert psutil.wait_procs(workers, timeout=LIMIT_S)[1] == []  # they end with it
        return number

    with monkeypatch.context() as patched:
        patched.setattr(ProcessGrid, "_ask", asked)
        with pytest.raises(RunError, match="the process that starts workers was killed"):
            launch.simulate(RECIPE, engine="processes", workers=2, run_dir=tmp_path / "run")
    resumed = launch.resume(tmp_path / "run", engine="processes", workers=1)
    assert resumed["model_sha256"] == reference["model_sha256"]


class Unsendable(Exception):
    def __init__(self, one: object, two: object) -> None:
        super().__init__(f"{one} {two}")


class Stub:
    """Stands for the run's objects: clients that do as they are told."""

    def __init__(self, train: Callable[[int, np.ndarray], int]) -> None:
        self._train = train

    def client(self, keys: KeyRing, serves: object) -> Stub:
        return self

    def as_app(self) -> ClientApp:
        app = ClientApp()

        @app.train()
        def train(message: Message, context: Any) -> Message:
            model = np.frombuffer(
                message.content.array_records[wire.ARRAYS]["model"].data, np.float32
            )
            told = int(message.content.config_records[wire.CONFIG]["told"])  # type: ignore[arg-type]
            content = RecordDict({wire.METRICS: MetricRecord({"answer": self._train(told, model)})})
            return Message(content=content, reply_to=message)

        return app


@contextlib.contextmanager
def grid(train: Callable[[int, np.ndarray], int], workers: int = 2) -> Iterator[ProcessGrid]:
    made = ProcessGrid(workers, Stub(train), KeyRing.from_seed(1))  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def messages(
    made: ProcessGrid, told: list[int], model: float = 1.0, size: int = 3
) -> list[Message]:
    record = ArrayRecord({"model": Array(np.full(size, model, np.float32))})
    return [
        made.create_message(
            RecordDict({wire.CONFIG: ConfigRecord({"told": number}), wire.ARRAYS: record}),
            "train",
            2,
            "1",
        )
        for number in told
    ]


def answers(replies: Iterator[Message]) -> list[int]:
    return [int(reply.content.metric_records[wire.METRICS]["answer"]) for reply in replies]  # type: ignore[arg-type]


def test_replies_come_in_order_and_a_new_model_reaches_every_worker() -> None:
    def slow_first(told: int, model: np.ndarray) -> int:
        time.sleep(0.05 if told % 4 == 0 else 0)
        return told * int(model[-1])

    with grid(slow_first, workers=3) as made:
        for factor in (1, 2, 3):
            told = list(range(17))
            replies = answers(
                made.deliver(messages(made, told, factor, size=500_000))
            )  # more than a pipe holds
            assert replies == [number * factor for number in told]


def test_a_worker_does_not_wait_for_the_caller(tmp_path: Path) -> None:
    """It has its next message before the caller gets the reply to the last one."""

    def record(told: int, model: np.ndarray) -> int:
        (tmp_path / str(told)).touch()
        return told

    with grid(record, workers=1) as made:
        replies = answers_one(made.deliver(messages(made, [1, 2])))
        assert next(replies) == 1
        wait_until((tmp_path / "2").exists)
        assert list(replies) == [2]


def test_a_round_that_was_given_up_does_not_answer_the_next_one() -> None:
    with grid(lambda told, model: told) as made:
        assert next(answers_one(made.deliver(messages(made, [1, 2, 3, 4])))) == 1
        assert answers(made.deliver(messages(made, [5, 6, 7, 8, 9]))) == [5, 6, 7, 8, 9]


def answers_one(replies: Iterator[Message]) -> Iterator[int]:
    for reply in replies:
        yield from answers(iter([reply]))


def test_a_workers_error_reaches_the_caller_as_it_is() -> None:
    def fail(told: int, model: np.ndarray) -> int:
        if told == 1:
            raise PrivacyError("not agreed to")
        if told == 2:
            raise Unsendable("one", "two")
        return told

    with grid(fail) as made:
        with pytest.raises(PrivacyError, match="not agreed to"):
            answers(made.deliver(messages(made, [0, 1])))
        with pytest.raises(RunError, match="a worker failed: Unsendable: one two"):
            answers(made.deliver(messages(made, [2])))
        assert answers(made.deliver(messages(made, [3]))) == [3]


def test_what_a_worker_warns_of_is_said_once() -> None:
    def warn(told: int, model: np.ndarray) -> int:
        import warnings

        warnings.warn(MemoryWarning("smaller blocks"), stacklevel=1)
        print("nobody reads this")
        return told

    with grid(warn) as made, pytest.warns(MemoryWarning, match="smaller blocks") as caught:
        answers(made.deliver(messages(made, [1, 2, 3, 4, 5])))
    assert len(caught) == 1


def test_a_block_that_kills_every_worker_ends_the_run() -> None:
    def die(told: int, model: np.ndarray) -> int:
        if told == 1:
            os._exit(1)
        return told

    with (
        grid(die) as made,
        pytest.raises(RunError, match=r"(lost \d+ times with its worker|workers were lost)"),
    ):
        answers(made.deliver(messages(made, list(range(40)))))


def test_workers_that_cannot_start_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_serve", lambda *arguments: os._exit(1))
    with (
        grid(lambda told, model: told) as made,
        pytest.raises(RunError, match="workers were lost in a row"),
    ):
        answers(made.deliver(messages(made, [1, 2])))


def _drive(run: Path) -> None:
    launch.simulate(
        RECIPE, engine="processes", workers=2, run_dir=run, progress=lambda row: time.sleep(LIMIT_S)
    )


def test_a_killed_driver_takes_its_workers_along(reference: dict[str, Any], tmp_path: Path) -> None:
    driver = multiprocessing.get_context("fork").Process(target=_drive, args=(tmp_path / "run",))
    driver.start()
    wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").exists(), "a first round")
    left = family(driver.pid)
    assert len(left) >= 3
    os.kill(driver.pid or 0, signal.SIGKILL)
    driver.join()
    wait_until(
        lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in left),
        "workers to end",
    )
    result = launch.resume(tmp_path / "run", engine="processes", workers=2)
    assert result["model_sha256"] == reference["model_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_ends_in_order(
    reference: dict[str, Any], tmp_path: Path, number: int, status: int
) -> None:
    """A signal to the whole group, as a terminal's Ctrl-C is."""
    run = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "simulations.cli",
        "simulate",
        "digits",
        "--engine",
        "processes",
        "--workers",
        "2",
    ]
    for override in OVERRIDES:
        command += ["--set", override]
    command += ["--set", "federation.rounds=200", "--run-dir", str(run)]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: run.exists() and len(RunFolder(run).rows()) > 1, "two rounds")
    left = family(started.pid)
    os.killpg(started.pid, number)
    said = started.communicate(timeout=LIMIT_S)[1]
    assert started.returncode == status
    assert f"continue with: fedlgm simulate --resume {run}" in said
    assert "Traceback" not in said
    wait_until(
        lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in left),
        "workers to end",
    )


def refused(recipe: Recipe, **options: Any) -> None:
    with engines.get("processes", EngineOptions(**options)).start(Assembly(recipe)):
        raise AssertionError("it started")


def test_what_forked_workers_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"has one thread per worker, not run\.threads = 2: use engine 'ray'"
    ):
        refused(recipes.load("digits", ["run.threads=2"]))
    with pytest.raises(ConfigError, match="trains on the CPU, not on cuda"):
        refused(RECIPE.with_values(training={"device": "cuda"}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="cannot fork its workers on a machine with a GPU"):
        refused(RECIPE)
    monkeypatch.undo()
    with pytest.raises(
        RunError, match=r"100000 workers need at least 10000 GiB of memory, .*: use --workers"
    ):
        refused(RECIPE, workers=100_000)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="needs Linux"):
        engines.get("processes")


def test_auto_picks_what_suits(monkeypatch: pytest.MonkeyPatch) -> None:
    def picked(device: str = "cpu", threads: int = 1, **options: Any) -> str:
        return engines.get("auto", EngineOptions(**options), device=device, threads=threads).name

    assert picked() == "processes"
    assert picked(threads=2) == "ray"
    assert picked(ray_address="auto") == "ray"
    assert picked(supernodes=3) == "flower"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert picked() == "ray"
    for count, name, engine in (
        (1, "cuda", "local"),
        (2, "cuda", "ray"),
        (2, "cuda:1", "local"),
        (0, "mps", "local"),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert picked(device=name) == engine
    monkeypatch.undo()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert picked() == "ray"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert picked() == "local"


def test_a_run_says_which_engine_auto_picked(reference: dict[str, Any], tmp_path: Path) -> None:
    result = launch.simulate(RECIPE, engine="auto", workers=2, run_dir=tmp_path / "run")
    assert (result["engine"], result["model_sha256"]) == ("processes", reference["model_sha256"])


@pytest.fixture
def ending_threads() -> Iterator[None]:
    """Threads that have used MKL and end, one after the other: each holds the locks of MKL's
    allocator for a moment, and about every fifth fork at such a moment computes nothing."""
    over, factor = threading.Event(), torch.ones(256, 256)

    def start_and_end() -> None:
        while not over.is_set():
            thread = threading.Thread(target=lambda: factor @ factor)
            thread.start()
            thread.join()

    starter = threading.Thread(target=start_and_end)
    starter.start()
    yield
    over.set()
    starter.join()


@pytest.mark.usefixtures("ending_threads")
def test_workers_compute_though_threads_end_when_they_are_forked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At least one of eight forks computes nothing with probability 83 %."""
    monkeypatch.setattr(processes, "_COMPUTES_S", (0.2, *processes._COMPUTES_S))

    def multiply(told: int, model: np.ndarray) -> int:
        return int((torch.full((256, 256), float(told)) @ torch.ones(256, 256))[0, 0])

    for _ in range(8):
        with grid(multiply, workers=1) as made:
            assert answers(made.deliver(messages(made, [1, 2]))) == [256, 512]


def test_a_fork_that_never_computes_is_replaced_and_at_last_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processes, "_COMPUTES_S", (0.1, 0.1))
    monkeypatch.setattr(processes, "_fork_workers", lambda *_: time.sleep(60))
    with pytest.raises(RunError, match=r"each of 2 processes .* end the other threads"):
        launch.simulate(RECIPE, engine="processes", workers=2, run_dir=tmp_path / "run")
    assert not family()


_AFTER_A_TRACE = """
import sys, torch
from torch._subclasses import FakeTensorMode

def net():
    with FakeTensorMode():  # as torch.compile and torch.export do
        torch.empty(1)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

if sys.argv[1] == "before":
    net()
    torch.ones(1, requires_grad=True).backward()
import fedlgm.errors, simulations
try:
    run = simulations.simulate(
        "digits", model=net, engine="processes", workers=1, progress=False,
        overrides=["federation.rounds=1", "federation.clients=4"], run_dir=sys.argv[2],
    )
    print(len(run.history))
except fedlgm.errors.RunError as error:
    print(error)
"""


@pytest.mark.parametrize(("when", "says"), [("during", "2\n"), ("before", "PyTorch has started")])
def test_forks_train_after_a_trace_or_the_run_is_refused(
    when: str, says: str, tmp_path: Path
) -> None:
    """A process whose first gradient comes after a trace has threads that forks lack."""
    command = [sys.executable, "-c", _AFTER_A_TRACE, when, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.startswith(says), done.stderr
    assert (tmp_path / "run").exists() == (when == "during")
