"""What is recorded of a run while it goes on."""

from __future__ import annotations

import itertools
import json
import math
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedlgm import mechanisms
from fedlgm.mechanisms.method import Method
from fedlgm.planning.distributed_trust import Shares
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy import Ledger
from fedlgm.privacy.guarantee import Trust
from simulations import launch
from simulations.config.assembly import Assembly
from simulations.config.recipe import Recipe
from simulations.runs import recorder
from simulations.runs.folder import RunFolder
from simulations.runs.rows import round_row
from strategies import LayerwiseFedAvg, RoundRecord
from strategies.server_optimizer import ServerOptimizer


def test_tensorboard_shows_the_rows(tiny: Callable[..., Recipe], tmp_path: Path) -> None:
    launch.simulate(tiny(), run_dir=tmp_path / "run")
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    rows = RunFolder.open(tmp_path / "run").rows()
    assert len(rows) == 3
    for name in ("accuracy", "loss", "epsilon", "claimed_epsilon", "noise_norm"):
        assert [(event.step, event.value) for event in board.Scalars(name)] == [
            (row["round"], pytest.approx(row[name], rel=1e-6)) for row in rows
        ]


def test_a_round_is_evaluated_while_the_next_one_trains(
    tiny: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: defaultdict[int, threading.Event] = defaultdict(threading.Event)
    rounds, configure, evaluate = (
        itertools.count(1),
        LayerwiseFedAvg.configure_train,
        recorder.evaluate,
    )

    def configure_train(self: LayerwiseFedAvg, *arguments: Any) -> Any:
        started[self.transcript.rounds + 1].set()
        return configure(self, *arguments)

    def evaluate_late(*arguments: Any, **options: Any) -> dict[str, float]:
        following = next(rounds) + 1
        assert following > 3 or started[following].wait(30)
        return evaluate(*arguments, **options)

    monkeypatch.setattr(LayerwiseFedAvg, "configure_train", configure_train)
    monkeypatch.setattr(recorder, "evaluate", evaluate_late)
    shown: list[int] = []
    launch.simulate(
        tiny(), run_dir=tmp_path / "run", progress=lambda row: shown.append(row["round"])
    )
    assert shown == [1, 2, 3]
    assert all("accuracy" in row for row in RunFolder.open(tmp_path / "run").rows())


def test_noise_under_local_trust_is_that_of_the_clients_who_took_part(
    tiny: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe = tiny(federation={"dropout": 0.5}, privacy={"trust": "local", "max_participations": 3})
    launch.simulate(recipe, run_dir=tmp_path / "run")
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        taking_part = [charge.round for charge in ledger.charges()]
    for row in RunFolder.open(tmp_path / "run").rows(private=True):
        each = math.sqrt(sum(norm**2 for norm in row["layer_noise"])) / 10
        present = taking_part.count(row["round"])
        assert 0 < present == row["present"] < row["cohort"]
        assert row["noise_scale"] == pytest.approx(each * math.sqrt(present), rel=1e-4)
        assert row["noise_norm"] == pytest.approx(
            each * math.sqrt(10), rel=1e-4
        )  # as many as are expected


@pytest.mark.parametrize("trust", ["central", "distributed"])
def test_public_noise_figures_do_not_depend_on_who_took_part(trust: Trust, tmp_path: Path) -> None:
    """Under distributed trust each node that answers adds a share: their number could be read off
    the noise."""
    mechanism, layers = mechanisms.get("gaussian"), LayerTable.from_sizes({"a": 4})
    sampling, given = Sampling("fixed", 10, 1.0), {"accountant": "rdp", "shares": Shares(7, 1)}
    facts = RunFacts(
        2.0, sampling, "replace-one", trust, 2, **given if trust == "distributed" else {}
    )
    plan = Method(mechanism, layers, facts).plan(Transcript.start(torch.zeros(4)))
    few, all_ = (round_row(RoundRecord(1, plan, 10, present, 0, 0.0)) for present in (7, 10))
    assert few == all_
    assert few["noise_scale"] == few["noise_norm"]


def test_who_took_part_is_in_private_files_only(
    tiny: Callable[..., Recipe], tmp_path: Path
) -> None:
    """Amplification needs a secret cohort; how long a round took and who failed tell of it, too."""
    secret = {"cohort", "present", "discarded", "seconds", "failures"}
    shown: list[dict[str, Any]] = []
    launch.simulate(tiny(), run_dir=tmp_path / "run", progress=shown.append)
    folder = RunFolder.open(tmp_path / "run")
    assert all(secret <= row.keys() for row in shown)  # the operator's own screen
    assert not any(secret & row.keys() for row in folder.rows())
    assert not {*secret, "seconds_per_round"} & (folder.result() or {}).keys()
    assert [secret <= row.keys() for row in folder.rows(private=True)] == [True] * 3
    private = tmp_path / "run" / "private"
    assert {file.stat().st_mode & 0o777 for file in (private, *private.iterdir())} == {0o700, 0o600}


def test_stragglers_train_less(tiny: Callable[..., Recipe], tmp_path: Path) -> None:
    digests = {
        launch.simulate(
            tiny(federation={"stragglers": rate}, training={"epochs": epochs}),
            run_dir=tmp_path / f"{rate} {epochs}",
        )["model_sha256"]: (rate, epochs)
        for rate, epochs in ((0.0, 2), (0.5, 2), (1.0, 2), (0.0, 1))
    }
    # A straggler trains for one epoch; where all do, it is as if the recipe said so.
    assert set(digests.values()) == {(0.0, 2), (0.5, 2), (0.0, 1)}


def test_files_are_strict_json(tiny: Callable[..., Recipe], tmp_path: Path) -> None:
    """Epsilon is infinite without privacy."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    launch.simulate(tiny(mechanism={"name": "none"}), run_dir=tmp_path / "run")
    for name in ("result.json", "metrics.jsonl"):
        lines = (tmp_path / "run" / name).read_text(encoding="utf-8")
        for text in [lines] if name == "result.json" else lines.splitlines():
            assert json.loads(text, parse_constant=refuse)["epsilon"] == "inf"
    folder = RunFolder.open(tmp_path / "run")
    assert [row["epsilon"] for row in folder.rows()] == [math.inf] * 3
    assert (folder.result() or {})["epsilon"] == math.inf


@pytest.mark.skipif(sys.platform != "linux", reason="threads of the system are listed in /proc")
def test_a_closed_recorder_leaves_no_thread_of_the_system(
    tiny: Callable[..., Recipe], tmp_path: Path
) -> None:
    """A thread that ends holds MKL's locks, which a fork would inherit."""
    assembly, folder, factor = Assembly(tiny()), RunFolder(tmp_path), torch.ones(256, 256)
    for _ in range(200):
        recording = recorder.Recorder(assembly, folder, ServerOptimizer("sgd", 1.0))
        native = recording._thread.submit(threading.get_native_id).result()
        recording._thread.submit(lambda: factor @ factor)
        recording.close()
        assert not Path(f"/proc/self/task/{native}").exists()
