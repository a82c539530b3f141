"""The command when workers die, disks are full or a signal reaches every process of the group."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import LIMIT_S, wait_until

from simulations import launch
from simulations.config.recipe import Recipe
from simulations.ending import ending
from simulations.entry import end_at_once
from simulations.runs import new_folder
from tests.support.forked import ForkedCommand

SLOW = (
    "--set",
    "federation.clients=40",
    "--set",
    "privacy.delta=1e-3",
    "--set",
    "training.epochs=10",
)


def start(*arguments: object, before: str = "") -> subprocess.Popen[str]:
    """The command in a session of its own; `before` is run when its first modules are imported.

    Ctrl-C works as from a terminal: a shell that starts the tests in the background has it ignored.
    """
    code = (
        "import signal, sys; sys.argv[0] = 'fedlgm'; signal.signal(signal.SIGINT, "
        "signal.default_int_handler)\n"
        f"from simulations.entry import main\n{before}\nmain()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def descendants(process: subprocess.Popen[str], name: str) -> list[psutil.Process]:
    """Living descendants whose command line holds `name`."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            found += [child] if name in " ".join(child.cmdline()) else []
        except psutil.Error:
            continue
    return found


def wait_for_three_rounds(process: subprocess.Popen[str], run: Path) -> None:
    rows = run / "metrics.jsonl"
    while process.poll() is None and not (rows.exists() and rows.read_text().count("\n") >= 3):
        time.sleep(0.05)


@pytest.mark.slow
def test_what_ray_says_of_a_lost_worker_is_not_output(tmp_path: Path) -> None:
    options = (
        "--engine",
        "ray",
        "--workers",
        2,
        "--rounds",
        15,
        *SLOW,
        "--run-dir",
        tmp_path / "run",
        "--json",
    )
    process = start("simulate", "digits", *options)
    wait_for_three_rounds(process, tmp_path / "run")
    workers = descendants(process, "ray::Worker")
    assert workers
    workers[0].kill()
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert json.loads(out)["rounds"] == 15


@pytest.mark.slow
def test_without_a_compiler_a_run_goes_on_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers find out, which are processes of their own."""
    monkeypatch.setenv("CXX", "/nonexistent-compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    compiled = ("--set", "training.vectorize=on", "--set", "training.compile=true")
    command = (
        "simulate",
        "digits",
        "--workers",
        2,
        "--rounds",
        2,
        *SLOW,
        "--set",
        "training.epochs=1",
    )
    process = start(*command, *compiled, "--run-dir", tmp_path / "run")
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert err.count("torch.compile does not work here") == 1


KILLED = ("--rounds", 12, *SLOW, "--set", "run.checkpoint_every=1", "--run-dir")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = tmp_path_factory.mktemp("unbroken") / "run"
    process = start("simulate", "digits", "--engine", "local", *KILLED, run, "--json")
    result: dict[str, Any] = json.loads(process.communicate(timeout=LIMIT_S)[0])
    return result


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "processes"])
def test_a_killed_command_resumes_to_the_model_of_an_unbroken_run(
    tmp_path: Path, engine: str, unbroken: dict[str, Any]
) -> None:
    process = start(
        "simulate", "digits", "--engine", engine, "--workers", 2, *KILLED, tmp_path / "run"
    )
    wait_for_three_rounds(process, tmp_path / "run")
    process.kill()
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == -signal.SIGKILL
    again = start(
        "simulate", "--resume", tmp_path / "run", "--engine", engine, "--workers", 2, "--json"
    )
    resumed = json.loads(again.communicate(timeout=LIMIT_S)[0])
    assert resumed["model_sha256"] == unbroken["model_sha256"]
    assert resumed["epsilon"] >= unbroken["epsilon"]


@pytest.mark.parametrize("seconds", [pytest.param(s, marks=pytest.mark.slow) for s in (0.25, 2.5)])
def test_a_signal_to_all_processes_ends_the_command_while_ray_starts(
    tmp_path: Path, seconds: float
) -> None:
    """As `timeout`, Slurm and containers send it; Ray would wait for its own processes for more
    than a minute."""
    process = start("simulate", "digits", "--engine", "ray", *SLOW, "--run-dir", tmp_path / "run")
    while process.poll() is None and not descendants(process, "gcs_server"):
        time.sleep(0.05)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGTERM)
    sent = time.monotonic()
    process.communicate(timeout=LIMIT_S)
    # 134: Ray's own handler aborts, for the moment between Ray's start and ours taking the signal
    # back.
    assert process.returncode in (143, -signal.SIGABRT)
    assert time.monotonic() - sent < 60  # twice 15 s of patience with Ray, at most
    assert not (tmp_path / "run").exists() or (tmp_path / "run" / "recipe.toml").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "seconds"), [("auto", 0.2), ("auto", 3.0), ("ray", 3.0)])
def test_ctrl_c_ends_the_command_while_it_starts(
    tmp_path: Path, engine: str, seconds: float
) -> None:
    """In the foreground it reaches the engine's processes, too."""
    begun = tmp_path / "begun"
    before = f"open({str(begun)!r}, 'w').close()"
    process = start(
        "simulate",
        "digits",
        "--engine",
        engine,
        *SLOW,
        "--rounds",
        300,
        "--run-dir",
        tmp_path / "run",
        before=before,
    )
    wait_until(begun.exists)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err


STOPPED_IN_DEL = """
import os, signal, torch

class Last:
    def __del__(self):
        os.kill(os.getpid(), signal.{name})
        for _ in range(1000):
            pass

def net():
    globals().pop("last", None)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

last = Last()
"""


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_that_python_drops_still_ends_the_command(
    tmp_path: Path, name: str, status: int
) -> None:
    """Exceptions are printed and dropped in a `__del__`; the command may be the second one of its
    process."""

    def before() -> None:
        sys.path.insert(0, str(tmp_path))
        with suppress(SystemExit):
            ending(lambda: None)

    (tmp_path / "stopped_in_del.py").write_text(STOPPED_IN_DEL.format(name=name))
    options = (
        "--engine",
        "local",
        "--rounds",
        200,
        *SLOW,
        "--set",
        "model.name=stopped_in_del:net",
    )
    command = ForkedCommand(
        tmp_path / "said",
        "simulate",
        "digits",
        *options,
        "--run-dir",
        tmp_path / "run",
        before=before,
    )
    ended, _, err = command.end()
    assert ended == status, err
    assert "Traceback" not in err


STOPPED_IN_IMPORT = """
import os, signal
class Stop:
    def find_spec(name, path=None, target=None):
        if name == "simulations.config.recipe": os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Stop)
"""


@pytest.mark.parametrize(
    "command",
    [
        ("simulate", "digits"),
        pytest.param(("plan", "digits", "--set", "training.lr=0.1"), marks=pytest.mark.slow),
    ],
)
def test_a_command_that_is_stopped_while_it_is_imported_says_so(command: tuple[str, ...]) -> None:
    process = start(*command, before=STOPPED_IN_IMPORT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, err
    assert (out, err.strip()) == ("", "interrupted")


SWALLOWED = """
import os, signal
class Stop:
    def find_spec(name, path=None, target=None):
        if name == "{module}":
            try:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(1000): pass
            except BaseException:
                pass
sys.meta_path.insert(0, Stop)
"""


@pytest.mark.parametrize("module", ["typer", "simulations.cli", "simulations.config.recipe"])
def test_a_stop_that_a_library_swallows_is_not_lost(module: str) -> None:
    """Before the command begins, too, when its own modules are imported."""
    process = start("simulate", "digits", before=SWALLOWED.format(module=module))
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, err
    assert (out, err.strip()) == ("", "interrupted")


def stopped(
    make: Callable[[Path], Any], folder: Path, begins: float, ends: float
) -> list[tuple[float, Any]]:
    """Twelve commands, each with the moment of its stop; they start at once, so that the machine is
    busy."""
    folder.mkdir()
    commands = [make(folder / str(number)) for number in range(12)]
    draw, begun = random.Random(folder.name), time.monotonic()
    moments = sorted((draw.uniform(begins, ends), number) for number in range(12))
    for moment, number in moments:
        time.sleep(max(0.0, moment - (time.monotonic() - begun)))
        os.kill(commands[number].pid, signal.SIGINT)
    return [(moment, commands[number]) for moment, number in moments]


STOPPED = ("simulate", "digits", "--engine", "local", "--rounds", 400, "--run-dir")


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(3))
def test_stops_at_random_moments_of_the_start_are_never_lost(tmp_path: Path, batch: int) -> None:
    """36 stops from Python's first moment on: a moment that loses one in twelve is found with
    probability 0.95."""
    for moment, process in stopped(
        lambda run: start(*STOPPED, run), tmp_path / str(batch), 0.3, 12
    ):
        _, err = process.communicate(timeout=LIMIT_S)
        if (
            process.returncode == 1 and "init_import_site" in err
        ):  # Python's own status, while it reads its site module
            continue
        assert process.returncode in (130, -signal.SIGINT), (
            moment,
            err,
        )  # -SIGINT: before main had begun


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(5))
def test_stops_at_random_moments_of_a_run_are_never_lost(tmp_path: Path, batch: int) -> None:
    """Sixty stops: a moment that loses one in twenty is found with probability 0.95.

    They come between the command's first call and its first rounds; imports are done."""

    def make(run: Path) -> ForkedCommand:
        begun = run.with_suffix(".begun")

        def before() -> None:
            signal.signal(signal.SIGINT, end_at_once)  # as the entry point does
            begun.touch()

        command = ForkedCommand(run.with_suffix(".said"), *STOPPED, run, before=before)
        command.wait_for(begun.exists)
        return command

    for moment, command in stopped(make, tmp_path / str(batch), 0.0, 5):
        status, _, err = command.end()
        assert status == 130, (moment, err)


def test_a_full_disk_is_said_and_the_run_goes_on_later(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk; the checkpoint is the largest."""
    options = [
        "model.hidden=[512]",
        "federation.clients=20",
        "federation.rounds=2",
        "privacy.delta=1e-3",
        "privacy.accountant=rdp",
    ]
    sets = [text for option in options for text in ("--set", option)]
    command = ForkedCommand(
        tmp_path / "said",
        "simulate",
        "digits",
        "--engine",
        "local",
        *sets,
        "--run-dir",
        tmp_path / "run",
        before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    ended, _, err = command.end()
    assert ended == 2
    assert "Traceback" not in err
    assert "cannot write the checkpoint" in err.replace("\n", " ")
    assert f"continue with: fedlgm simulate --resume {tmp_path / 'run'}" in err.replace("\n", "")
    assert not list(tmp_path.glob("run/checkpoints/*.partial"))
    assert launch.resume(tmp_path / "run")["rounds"] == 2


def test_runs_of_the_same_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Recipe]
) -> None:
    """Forked processes take their folders' names at once, from a clock that stands still."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-000000")
    recipe, context = tiny(), multiprocessing.get_context("fork")
    together = context.Barrier(4)

    def take() -> None:
        together.wait()
        new_folder.create(None, recipe)

    processes = [context.Process(target=take) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        assert process.exitcode == 0
    assert len(list(Path("runs").iterdir())) == 4
