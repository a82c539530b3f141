"""One recipe, one model: every engine and any number of workers give the same bits, and leave
nothing running."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
import ray
from flwr.app import Context, RecordDict
from patience import LIMIT_S, wait_until

from clients import LayerwiseClient
from fedlgm.errors import FedlgmError
from fedlgm.training import native
from simulations import launch
from simulations.config import recipe as recipes
from simulations.config.decided import resolve_hardware
from simulations.config.recipe import Recipe
from simulations.engines.flower_entry import make_server_app
from simulations.engines.local import LocalGrid
from simulations.runs import new_folder
from simulations.runs.folder import RunFolder
from tests.support.interruption import Interrupted, interrupt_at, take_ctrl_c

SAME = (
    "model_sha256",
    "accuracy",
    "epsilon",
    "claimed_epsilon",
    "rounds",
    "noise_multiplier",
    "guarantee",
)


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return recipes.load(
        "digits",
        [
            "federation.clients=20",
            "federation.rounds=3",
            "federation.rate=0.6",
            "federation.dropout=0.2",
            "mechanism.clip=med",
            "mechanism.norms=quantile",
            "privacy.accountant=rdp",
            "run.block_size=2",
        ],
    )


@pytest.fixture(scope="module")
def reference(recipe, tmp_path_factory):
    return launch.simulate(recipe, engine="local", run_dir=tmp_path_factory.mktemp("local") / "run")


def processes() -> set[tuple[int, str]]:
    """(pid, command line) of Flower's and Ray's processes."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (
                    (entry / "cmdline").read_bytes().replace(b"\x00", b" ").decode(errors="replace")
                )
            except OSError:
                continue
            if any(
                name in command
                for name in ("flower-super", "flwr-", "raylet", "gcs_server", "ray::")
            ):
                found.add((int(entry.name), command))
    return found


def descendants(found: set[tuple[int, str]], marker: str) -> set[tuple[int, str]]:
    """Those whose environment carries our marker: others may be running something of their own."""
    ours = set()
    for pid, command in found:
        try:
            if marker.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                ours.add((pid, command))
        except OSError:
            continue
    return ours


@pytest.fixture
def nothing_left(monkeypatch):
    """Fails if a process that the test started, at any depth, outlives it by more than its last
    moments."""
    marker = f"FEDLGM_TEST_{os.getpid()}_{os.urandom(4).hex()}"
    monkeypatch.setenv(marker, "1")
    yield
    deadline = time.monotonic() + LIMIT_S / 10
    while (left := descendants(processes(), marker)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == set()


@pytest.fixture
def another_cluster(monkeypatch):
    """What `ray start` leaves for whoever starts Ray next on the machine: the address of the latest
    cluster."""
    with tempfile.TemporaryDirectory(prefix="fedlgm-ray-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "ray").mkdir()
        (Path(folder) / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"engine": "ray", "workers": 2}, id="ray, 2 workers"),
        pytest.param(
            {"engine": "flower", "workers": 2, "supernodes": 20},
            id="flower, a node per client",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_engines_agree_bit_by_bit(
    recipe, reference, tmp_path, another_cluster, nothing_left, options
):
    """On Ray and Flower of their own, whatever cluster there is; on Flower the compiled kernel."""
    if options["engine"] == "flower":
        recipe = recipe.with_values(training={"kernel": "auto"})
        reference = launch.simulate(recipe, engine="local", run_dir=tmp_path / "local")
        kernel = RunFolder(tmp_path / "local").recipe().training.kernel
        assert kernel == (None if native.instruction_set() is None else "native")
    rows = []
    result = launch.simulate(recipe, run_dir=tmp_path / "run", progress=rows.append, **options)
    assert {name: result[name] for name in SAME} == {name: reference[name] for name in SAME}
    assert result["engine"] == options["engine"]
    assert [row["round"] for row in rows] == [1, 2, 3]
    drawn = [row["cohort"] for row in RunFolder(Path(reference["run"])).rows(private=True)]
    assert [row["cohort"] for row in rows] == drawn


@pytest.mark.slow
@pytest.mark.skipif(native.instruction_set() is None, reason="the kernel needs AVX2")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"engine": "processes", "workers": 3}, id="processes, 3 workers"),
        pytest.param({"engine": "ray", "workers": 2}, id="ray, 2 workers"),
    ],
)
def test_engines_agree_on_what_the_compiled_kernel_trains(recipe, tmp_path, nothing_left, options):
    kernel = recipe.model_copy(
        update={"training": recipe.training.model_copy(update={"kernel": "auto"})}
    )
    runs = [
        launch.simulate(kernel, run_dir=tmp_path / str(i), **engine)
        for i, engine in enumerate([{"engine": "local"}, options])
    ]
    assert [RunFolder(tmp_path / str(i)).recipe().training.kernel for i in range(2)] == [
        "native",
        "native",
    ]
    assert {name: runs[0][name] for name in SAME} == {name: runs[1][name] for name in SAME}


def correlated(*overrides: str) -> Recipe:
    return recipes.load(
        "correlated-digits",
        ["federation.clients=20", "federation.rate=0.25", "federation.sampling=min-separation",
         "federation.dropout=0.2", "run.block_size=2", "run.checkpoint_every=2", *overrides],
    )  # fmt: skip


@pytest.mark.slow
def test_an_interrupted_correlated_run_goes_on_on_ray(tmp_path, one_ray):
    """Stopped at two random rounds and continued there: the bits of a whole run."""
    recipe, chance = correlated("federation.rounds=12", "run.seed=3"), random.Random("ray 3")
    stops = chance.randint(1, 3), chance.randint(5, 6)
    options = {"engine": "ray", "workers": 2}
    with pytest.raises(Interrupted):
        launch.simulate(
            recipe, run_dir=tmp_path / "run", progress=interrupt_at(stops[0]), **options
        )
    with pytest.raises(Interrupted):
        launch.resume(tmp_path / "run", progress=interrupt_at(stops[1]), **options)
    there = launch.resume(tmp_path / "run", **options)
    here = launch.simulate(recipe, engine="local", run_dir=tmp_path / "local")
    assert {name: there[name] for name in SAME} == {name: here[name] for name in SAME}


@pytest.mark.slow
def test_an_interrupted_flower_run_ends_and_can_be_continued(tmp_path, nothing_left):
    """Flower starts its processes in sessions of their own: they would go on training.

    The run has correlated noise and secret keys, which Flower's processes read. It goes on to the
    bits of a copy of its folder that is continued here."""
    rounds = 24  # the command polls the finished rounds: enough of them follow the stop
    recipe = correlated(
        f"federation.rounds={rounds}", f"run.evaluate_every={rounds}", "run.seed=none"
    )
    file, run = tmp_path / "long.toml", tmp_path / "run"
    file.write_text(recipe.to_toml(), encoding="utf-8")
    command = [sys.executable, "-m", "simulations.cli", "simulate", str(file), "--engine", "flower"]
    command += ["--run-dir", str(run), "--workers", "2"]
    take_ctrl_c()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and len(RunFolder(run).rows()) < 2:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert "continue with" in err
    rows = (run / "metrics.jsonl").read_bytes()
    time.sleep(2)
    assert (run / "metrics.jsonl").read_bytes() == rows
    assert rows.count(b"\n") < rounds
    with RunFolder(run).lock():
        pass  # nobody else works on it
    shutil.copytree(run, tmp_path / "copy")
    here = launch.resume(tmp_path / "copy")
    there = launch.resume(run, engine="flower", workers=2)
    assert {name: there[name] for name in SAME} == {name: here[name] for name in SAME}


@pytest.mark.slow
def test_a_callers_own_ray_is_used_and_stays(recipe, reference, tmp_path, one_ray):
    kept = ray.put(123)
    result = launch.simulate(recipe, engine="ray", workers=2, run_dir=tmp_path / "run")
    assert ray.get(kept) == 123
    wait_until(lambda: ray.available_resources().get("CPU") == 2, "the end of the actors")
    assert result["model_sha256"] == reference["model_sha256"]


def test_another_seed_is_another_model(recipe, reference, tmp_path):
    other = recipe.model_copy(update={"run": recipe.run.model_copy(update={"seed": 8})})
    assert (
        launch.simulate(other, run_dir=tmp_path / "run")["model_sha256"]
        != reference["model_sha256"]
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "spark"}, "unknown engine 'spark'; known: local, ray, flower"),
        ({"engine": "local", "ray_address": "auto"}, "a Ray address is for engine 'ray'"),
        ({"engine": "ray", "supernodes": 3}, "SuperNodes is for engine 'flower'"),
        ({"engine": "ray", "workers": 0}, "workers must be a whole number of at least 1, got 0"),
        (
            {"engine": "ray", "workers": 10_000},
            r"10000 workers need at least 5000 GiB .* cores: use --workers \d+$",
        ),
    ],
)
def test_what_cannot_run_leaves_nothing(recipe, tmp_path, options, words):
    with pytest.raises(FedlgmError, match=words):
        launch.simulate(recipe, run_dir=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def failing_clients(tmp_path, monkeypatch):
    """Every process started from now on has clients that raise when they train."""
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(
            """
            import importlib.abc, importlib.machinery, sys

            class Patched(importlib.abc.MetaPathFinder):
                def find_spec(self, name, path=None, target=None):
                    if name != "clients.layerwise":
                        return None
                    spec = importlib.machinery.PathFinder.find_spec(name, path)
                    run = spec.loader.exec_module
                    def exec_module(module):
                        run(module)
                        def train(self, message, context):
                            raise MemoryError("the client ran out of memory")
                        module.LayerwiseClient.train = train
                    spec.loader.exec_module = exec_module
                    return spec

            sys.meta_path.insert(0, Patched())
            """
        )
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def test_failing_clients_fail_the_run_in_this_process(recipe, tmp_path, run, monkeypatch):
    def train(self, message, context):
        raise MemoryError("the client ran out of memory")

    monkeypatch.setattr(LayerwiseClient, "train", train)
    file = tmp_path / "recipe.toml"
    file.write_text(recipe.to_toml(), encoding="utf-8")
    status, _, err = run("simulate", file, "--engine", "local", "--run-dir", tmp_path / "run")
    assert status == 2
    assert "error: the client ran out of memory" in err
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "flower"])
def test_failing_clients_fail_the_run(recipe, tmp_path, failing_clients, nothing_left, engine):
    """Flower's own exit code would be 0, and what it says last is that there was an error."""
    file = tmp_path / "recipe.toml"
    file.write_text(recipe.to_toml(), encoding="utf-8")
    command = [sys.executable, "-m", "simulations.cli", "simulate", str(file), "--engine", engine]
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run"), "--workers", "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "ran out of memory" in done.stderr
    assert not (tmp_path / "run" / "result.json").exists()
    if engine == "flower":
        assert done.returncode == 2
        assert (
            "Flower reports finished:failed for the run. MemoryError: the client ran out of "
            "memory\n" in done.stderr
        )


def test_the_flower_app_continues_a_run_with_its_own_recipe_only(tmp_path):
    """Clients build themselves from the run config: they would train by another recipe than the
    server's."""
    folder = new_folder.create(
        tmp_path / "run", resolve_hardware(recipes.load("digits", ["training.lr=0.01"]))
    )
    config = {"run-dir": str(folder.path), "recipe": "digits", "set": ""}
    context = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config=config)
    with pytest.raises(FedlgmError, match="a different recipe from the run config"):
        make_server_app()(LocalGrid(None), context)
    assert not folder.metrics.path.exists()


def test_the_flower_app_names_the_workers_of_a_simulation_that_does_not_say_that_it_is_one(
    tmp_path,
):
    config = {"run-dir": str(tmp_path / "run"), "recipe": "digits", "set": ""}
    context = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config=config)
    with pytest.raises(FedlgmError, match=r'for a simulation add nodes="workers" to --run-config'):
        make_server_app()(LocalGrid(None), context)
    assert not (tmp_path / "run").exists()


def test_the_flower_app_refuses_a_model_that_remembers(tmp_path, monkeypatch):
    """`flwr run` asks nobody else than the app's server."""
    (tmp_path / "remembering.py").write_text(
        "import torch\n\nclass Net(torch.nn.Sequential):\n    seen = 0.0\n\n    def forward(self, "
        "x):\n"
        "        self.seen = self.seen + x.detach().mean(0)\n        return super().forward(x + "
        "self.seen)\n\n"
        "def net():\n    return Net(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {
        "run-dir": str(tmp_path / "run"),
        "recipe": "digits",
        "set": "model.name=remembering:net",
    }
    config["nodes"] = "workers"
    context = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config=config)
    with pytest.raises(FedlgmError, match="it remembers what it has seen"):
        make_server_app()(LocalGrid(None), context)
    assert not (tmp_path / "run").exists()
