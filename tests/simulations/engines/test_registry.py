"""Engines of a user's own: as an object, by a registered name, by a reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args

import simulations
from clients import AnyClient
from fedlgm.errors import ConfigError, RunError
from fedlgm.noise.keys import KeyRing
from simulations import engines
from simulations.config.assembly import Assembly
from simulations.config.recipe import load as load_recipe
from simulations.engines import EngineOptions, GridEngine
from simulations.engines.flower import _run_config
from simulations.engines.flower_command import config_file
from simulations.engines.local import LocalEngine, LocalGrid
from simulations.runs import new_folder

TWO_ROUNDS = [
    "federation.rounds=2",
    "federation.clients=20",
    "training.epochs=1",
    "privacy.accountant=rdp",
]


class Counting(GridEngine):
    name = "counting"
    served = 0

    @contextmanager
    def grid(self, assembly: Assembly, keys: KeyRing) -> Iterator[LocalGrid]:
        Counting.served += 1
        yield LocalGrid.of(assembly.client(keys, AnyClient()))


def not_an_engine(options: EngineOptions) -> str:
    return "local"


def three_arguments(subject: object, settings: object, progress: object) -> None:
    """Takes other arguments than an engine's options."""


def test_an_object_serves_a_run_and_its_resumption(tmp_path: Path) -> None:
    local = simulations.simulate(overrides=TWO_ROUNDS, run_dir=tmp_path / "local")
    before = Counting.served
    own = simulations.simulate(overrides=TWO_ROUNDS, engine=Counting(), run_dir=tmp_path / "own")
    assert (own["engine"], own["model_sha256"]) == ("counting", local["model_sha256"])
    assert Counting.served == before + 1
    assert (
        simulations.resume(tmp_path / "own", engine=Counting())["model_sha256"]
        == local["model_sha256"]
    )


class Failing(Counting):
    def wait(self) -> None:
        raise RunError("no actors")


def test_a_run_whose_services_do_not_start_writes_nothing(tmp_path: Path) -> None:
    folders: list[Path] = []
    with pytest.raises(RunError, match="no actors"):
        simulations.simulate(
            overrides=TWO_ROUNDS,
            engine=Failing(),
            run_dir=tmp_path / "run",
            on_folder=folders.append,
        )
    assert folders == list(tmp_path.iterdir()) == []


def test_a_registered_name_is_found_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines._ENGINES, "_items", dict(engines._ENGINES._items))
    engines.register("counting", Counting)
    engines.register("counting", Counting)
    assert isinstance(engines.get("counting"), Counting)
    assert "counting" in engines.names()
    with pytest.raises(ConfigError, match="there is an engine 'local' already"):
        engines.register("local", Counting)
    with pytest.raises(ConfigError, match="there is an engine 'auto' already"):
        engines.register("auto", Counting)
    with pytest.raises(
        ConfigError, match="engine 'three': it must be a class or function of the options, got 3"
    ):
        engines.register("three", 3)  # type: ignore[arg-type]


def test_a_reference_is_imported() -> None:
    assert isinstance(
        engines.get("simulations.engines.local:LocalEngine", EngineOptions(workers=2)), LocalEngine
    )


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        (Counting(), EngineOptions(workers=2), "given as an object: pass its options to it"),
        (f"{__name__}:Missing", EngineOptions(), "Missing"),
        (
            not_an_engine,
            EngineOptions(),
            "engine '<not_an_engine>' is of type str, not an `Engine`",
        ),
        ("ray", EngineOptions(supernodes=2), "SuperNodes is for engine 'flower'"),
        (None, EngineOptions(), "unknown engine None"),
        (
            three_arguments,
            EngineOptions(),
            "^engine '<three_arguments>' is made from its options alone: missing",
        ),
        (
            f"{__name__}:three_arguments",
            EngineOptions(),
            f"engine '{__name__}:three_arguments' is made from its",
        ),
    ],
)
def test_what_is_no_engine_is_refused(engine: object, options: EngineOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engines.get(engine, options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ray", "flower"])
def test_a_folder_that_ray_cannot_use_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Ray ended in a traceback with UnicodeEncodeError."""
    monkeypatch.setenv("TMPDIR", "/tmp/Übung")
    with pytest.raises(
        ConfigError,
        match=rf"^engine '{name}': Ray cannot keep its files under /tmp/Übung \(TMPDIR\)",
    ):
        engines.get(name)
    engines.get("local")
    engines.get("ray", EngineOptions(ray_address="10.0.0.1:6379"))
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    engines.get(name)


def test_flower_reads_any_path_of_a_run(tmp_path: Path) -> None:
    """Quotes and emoji in a path ended in "The provided configuration string is in an invalid
    format"."""
    folder = new_folder.create(
        tmp_path / 'O\'Brien "b" = 😀', load_recipe("digits", ["run.seed=none"])
    )
    folder.private.mkdir()
    config = _run_config(folder, 2, folder.private / "objects.pkl")
    assert parse_config_args([config_file(folder.private / "flower.toml", config)]) == config
    assert {config["run-dir"], config["keys"]} == {str(folder.path)}
