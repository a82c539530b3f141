"""Trackers follow a run: public figures only, per layer, without being able to harm it."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from patience import LIMIT_S
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedlgm.errors import ConfigError, Notice, RunError
from simulations import launch
from simulations.config.recipe import Recipe
from simulations.runs import trackers
from simulations.runs.folder import RunFolder
from simulations.runs.rows import PrivateRow
from simulations.runs.trackers import RunStart, Tracker, Trackers, scalars
from strategies import LayerwiseFedAvg

SUPPORT = str(Path(__file__).parents[2] / "support")


class Notes:
    """A tracker that notes what it is told; `fails` names the method that raises, from round `at`
    on."""

    def __init__(self, fails: str = "", at: int = 1) -> None:
        self.told: list[tuple[str, Any]] = []
        self._fails, self._at = fails, at

    def _note(self, method: str, value: Any, round: int = 1) -> None:
        self.told.append((method, value))
        if method == self._fails and round >= self._at:
            raise ConnectionError(f"no server in {method}")

    def start(self, run: RunStart) -> None:
        self._note("start", run)

    def round(self, row: Mapping[str, Any]) -> None:
        self._note("round", row, row["round"])

    def end(self, summary: Mapping[str, Any] | None) -> None:
        self._note("end", summary)


def made_in_a_recipe() -> Notes:
    return Notes()


class Stopped(Exception):
    pass


def test_a_tracker_is_told_what_is_public(tiny: Callable[..., Recipe], tmp_path: Path) -> None:
    notes = Notes()
    assert isinstance(notes, Tracker)
    result = launch.simulate(tiny(), run_dir=tmp_path / "run", trackers=[notes])
    (first, run), *rounds, (last, summary) = notes.told
    assert (first, last) == ("start", "end")
    assert [row for _, row in rounds] == RunFolder.open(tmp_path / "run").rows()
    private = set(get_type_hints(PrivateRow)) - {"round"}
    assert all(not private & row.keys() for _, row in rounds)
    assert (run.name, run.folder, run.rounds_done) == ("tiny", tmp_path / "run", 0)
    assert run.layers == {"fc1": 520, "fc2": 90}
    assert run.facts.noise_multiplier == result["noise_multiplier"]
    assert run.recipe["privacy"]["epsilon"] == 8.0
    assert summary == RunFolder.open(tmp_path / "run").result()
    assert not (
        tmp_path / "run" / "tensorboard"
    ).exists()  # given trackers take the place of the recipe's


def test_a_failing_tracker_does_not_harm_the_run(
    tiny: Callable[..., Recipe], tmp_path: Path
) -> None:
    alone = launch.simulate(tiny(), run_dir=tmp_path / "alone", trackers=[])
    bad, good = Notes("round", at=2), Notes("end")
    with pytest.warns(Notice) as warned:
        followed = launch.simulate(tiny(), run_dir=tmp_path / "followed", trackers=[bad, good])
    place = f"(test_trackers.py, line {Notes._note.__code__.co_firstlineno + 3})"
    assert sorted(str(w.message) for w in warned) == [
        f"tracker Notes failed at the end of the run: ConnectionError: no server in end {place}",
        (
            "tracker Notes failed in round 2 and gets no more rounds: ConnectionError: no server "
            f"in round {place}"
        ),
    ]
    assert [method for method, _ in bad.told] == ["start", "round", "round"]
    assert [method for method, _ in good.told] == ["start", "round", "round", "round", "end"]
    assert followed["model_sha256"] == alone["model_sha256"]


class Clearing:
    """Empties whatever it is handed."""

    def start(self, run: RunStart) -> None: ...

    def round(self, row: dict[str, Any]) -> None:
        row["epsilon"] = 0.0
        row["share"].clear()
        row.clear()

    def end(self, summary: dict[str, Any] | None) -> None:
        if summary is not None:
            summary.clear()


def test_what_a_tracker_does_to_its_rows_reaches_nobody(
    tiny: Callable[..., Recipe], tmp_path: Path
) -> None:
    seen, notes = [], Notes()
    result = launch.simulate(
        tiny(), run_dir=tmp_path / "run", trackers=[Clearing(), notes], progress=seen.append
    )
    rows = RunFolder.open(tmp_path / "run").rows()
    assert [row for method, row in notes.told if method == "round"] == rows
    assert [row["epsilon"] for row in seen] == [row["epsilon"] for row in rows]
    assert result["run"] == str(tmp_path / "run")


def test_a_tracker_that_cannot_start_stops_the_run(
    tiny: Callable[..., Recipe], tmp_path: Path
) -> None:
    before = Notes()
    with pytest.raises(
        RunError, match="tracker Notes cannot start: ConnectionError: no server in start"
    ):
        launch.simulate(tiny(), run_dir=tmp_path / "run", trackers=[before, Notes("start")])
    assert [method for method, _ in before.told] == ["start", "end"]
    assert before.told[-1][1] is None
    assert not (tmp_path / "run" / "ledger.sqlite").exists()


def test_an_interrupted_run_goes_on(
    tiny: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure = LayerwiseFedAvg.configure_train

    def stop(self: LayerwiseFedAvg, *arguments: Any) -> Any:
        if self.transcript.rounds == 3:
            raise Stopped
        return configure(self, *arguments)

    notes, again = Notes(), Notes()
    recipe = tiny(run={"checkpoint_every": 2}, federation={"rounds": 4})
    with monkeypatch.context() as stopped:
        stopped.setattr(LayerwiseFedAvg, "configure_train", stop)
        with pytest.raises(Stopped):
            launch.simulate(recipe, run_dir=tmp_path / "run", trackers=["tensorboard", notes])
    assert [row["round"] for method, row in notes.told if method == "round"] == [1, 2, 3]
    assert notes.told[-1] == ("end", None)
    launch.resume(tmp_path / "run", trackers=[again])
    run = again.told[0][1]
    assert run.rounds_done == 2
    assert [row["round"] for method, row in again.told if method == "round"] == [3, 4]
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("noise_norm")] == [1, 2, 3, 4]


def test_tensorboard_shows_layers_and_no_real_times(
    tiny: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe = tiny(mechanism={"clip": "med", "norms": "quantile"}, run={"evaluate_every": 2})
    result = launch.simulate(
        recipe, run_dir=tmp_path / "run"
    )  # TensorBoard is the default where it is installed
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    rows = RunFolder.open(tmp_path / "run").rows()
    for tag, key in {
        "bound": "clip", "noise": "layer_noise", "snr": "snr", "share": "share", "released_norm": "released_norm",
    }.items():  # fmt: skip
        for j, layer in enumerate(("fc1", "fc2")):
            assert [event.value for event in board.Scalars(f"{tag}/{layer}")] == pytest.approx(
                [row[key][j] for row in rows], rel=1e-5
            )
    clipped = [event.value for event in board.Scalars("clipped/fc1")]
    assert clipped == pytest.approx(
        [1 - row["queries"]["below-bound"][0] for row in rows], rel=1e-5, abs=1e-6
    )
    assert [event.step for event in board.Scalars("accuracy")] == [2, 3]
    times = [event.wall_time for event in board.Scalars("noise_norm")]
    assert [after - before for before, after in itertools.pairwise(times)] == [1.0, 1.0]
    for name in ("guarantee", "epsilon", "attack"):
        text = board.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode()
        assert text == str(result[name])


def test_released_norms_are_those_of_the_released_mean(
    tiny: Callable[..., Recipe], tmp_path: Path
) -> None:
    """With an SGD server of rate 1 the model moves by the released mean."""
    launch.simulate(tiny(run={"checkpoint_every": 1}), run_dir=tmp_path / "run", trackers=[])
    from simulations.config.assembly import Assembly

    folder = RunFolder.open(tmp_path / "run")
    layers = Assembly(folder.recipe()).model.layers
    checkpoint = folder.checkpoints.latest(layers)
    assert checkpoint is not None
    before, after = checkpoint.transcript.models[-2:]
    assert folder.rows()[-1]["released_norm"] == pytest.approx(
        layers.norms(after - before).tolist(), rel=1e-3
    )


def test_what_is_not_finite_or_not_released_is_left_out() -> None:
    row = {"round": 1, "epsilon": float("inf"), "metrics": {"loss": float("nan"), "accuracy": 0.5}}
    row |= {"sigma": [1.0, None], "snr": [2.0, 0.0]}
    assert scalars(row, ["a", "b"]) == {"accuracy": 0.5, "snr/a": 2.0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("tensorbord", "unknown tracker 'tensorbord'; did you mean 'tensorboard'"),
        ("test_trackers:Nothing", "module 'test_trackers' has no 'Nothing'"),
        ("json:loads", "cannot be made without arguments"),
        ("collections:OrderedDict", "has no method 'start'"),
        (object(), "tracker object has no method 'start'"),
    ],
)
def test_what_is_no_tracker_is_refused_before_a_folder_exists(
    given: Any,
    message: str,
    tiny: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "test_trackers", sys.modules[__name__])
    with pytest.raises(ConfigError, match=f"^run.trackers:? .*{re.escape(message)}"):
        launch.simulate(tiny(), run_dir=tmp_path / "run", trackers=[given])
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_named(
    tiny: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "is_installed", lambda name: False)
    for name in trackers.names():
        with pytest.raises(
            ConfigError, match=rf"needs the package '{name}'.*: pip install 'fedlgm\[{name}\]'"
        ):
            launch.simulate(tiny(run={"trackers": [name]}), run_dir=tmp_path / "refused")
    launch.simulate(
        tiny(), run_dir=tmp_path / "run"
    )  # the default asks for nothing that is missing
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_tracker_named_in_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "test_trackers", sys.modules[__name__])
    for name in ("Notes", "made_in_a_recipe"):
        assert isinstance(trackers.make(f"test_trackers:{name}"), Notes)


def test_objects_do_not_reach_the_server_of_the_flower_engine(
    tiny: Callable[..., Recipe], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="another process"):
        launch.simulate(tiny(), engine="flower", run_dir=tmp_path / "run", trackers=[Notes()])
    assert not (tmp_path / "run").exists()


def test_ended_once() -> None:
    notes = Notes()
    group = Trackers(objects=[notes])
    group.end({"epsilon": 1.0})
    group.end(None)
    assert notes.told == [("end", {"epsilon": 1.0})]


# -- the real thing ------------------------------------------------------------------------------------------------

_TWICE = textwrap.dedent(
    """
    import sys, warnings
    from pathlib import Path
    import federations
    from simulations import launch
    from simulations.config import recipe as recipes
    from strategies import LayerwiseFedAvg

    tracker, folder = sys.argv[1], Path(sys.argv[2])
    values = federations.tiny_values()
    values["run"]["trackers"] = [tracker]

    configure = LayerwiseFedAvg.configure_train

    def stop(self, *arguments):
        if self.transcript.rounds == 2:
            LayerwiseFedAvg.configure_train = configure
            raise KeyboardInterrupt
        return configure(self, *arguments)

    LayerwiseFedAvg.configure_train = stop
    warnings.filterwarnings("error", "tracker")
    try:
        launch.simulate(recipes.Recipe.model_validate(values), run_dir=folder)
    except KeyboardInterrupt:
        launch.resume(folder)
    """
)


def _run_twice(
    tracker: str, folder: Path, called_in: Path | None = None, **environment: str
) -> None:
    """A run that is interrupted after two rounds and continued, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _TWICE, tracker, str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([SUPPORT, *sys.path])} | environment,
        cwd=called_in,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs fedlgm[mlflow]")
def test_mlflow_has_the_run(tmp_path: Path) -> None:
    store = (
        f"sqlite:///{tmp_path / 'mlflow.db'}"
        if find_spec("sqlalchemy") and find_spec("alembic")
        else ""
    )
    store = store or (tmp_path / "mlruns").as_uri()
    _run_twice(
        "mlflow", tmp_path / "run", MLFLOW_TRACKING_URI=store, MLFLOW_ALLOW_FILE_STORE="true"
    )
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("fedlgm")
    (run,) = client.search_runs([experiment.experiment_id])  # one, though the run was interrupted
    result, rows = (
        RunFolder.open(tmp_path / "run").result(),
        RunFolder.open(tmp_path / "run").rows(),
    )
    assert result is not None
    assert run.info.status == "FINISHED"
    for name in ("guarantee", "epsilon", "attack", "model_sha256"):
        assert run.data.tags[f"fedlgm.{name}"] == str(result[name])
    rate = result["attack_rates"]["tpr"]["0.01"]
    assert float(run.data.tags["fedlgm.attack_rates.tpr.0.01"]) == rate
    assert run.data.params["mechanism.name"] == "snr-consistent"
    for name, key in (("share/fc1", "share"), ("bound/fc1", "clip")):
        history = client.get_metric_history(run.info.run_id, name)
        assert [(m.step, m.value) for m in history] == [
            (row["round"], pytest.approx(row[key][0])) for row in rows
        ]
        assert history[1].timestamp - history[0].timestamp == 1000


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(find_spec, ("mlflow", "sqlalchemy", "alembic"))),
    reason="needs fedlgm[mlflow], sqlalchemy and alembic",
)
def test_mlflow_without_a_server_writes_into_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not into the directory in which the command was called."""
    called_in = tmp_path / "called in"
    called_in.mkdir()
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    _run_twice("mlflow", tmp_path / "a run", called_in)
    assert list(called_in.iterdir()) == []
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'a run' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("fedlgm").experiment_id])
    assert run.info.status == "FINISHED"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("wandb") is None, reason="needs fedlgm[wandb]")
def test_wandb_has_the_run(tmp_path: Path) -> None:
    """Offline: W&B writes all that it would send into a log."""
    _run_twice("wandb", tmp_path / "run", WANDB_MODE="offline", WANDB_SILENT="true")
    from wandb.proto import wandb_internal_pb2

    history, summary, config, ids = [], {}, {}, set()
    for file in sorted((tmp_path / "run").rglob("*.wandb"), key=lambda path: path.stat().st_mtime):
        for data in _logged(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            assert kind not in ("stats", "output_raw", "files"), (
                record
            )  # system metrics and the console stay here
            if kind == "history":
                history.append({item.key or item.nested_key[0]: json.loads(item.value_json)
                                for item in record.history.item})  # fmt: skip
            elif kind == "run":
                ids.add(record.run.run_id)
                config |= {
                    item.key: json.loads(item.value_json) for item in record.run.config.update
                }
            elif kind == "summary":
                summary |= {
                    i.key or i.nested_key[0]: json.loads(i.value_json)
                    for i in record.summary.update
                }
    result, rows = (
        RunFolder.open(tmp_path / "run").result(),
        RunFolder.open(tmp_path / "run").rows(),
    )
    assert result is not None
    assert len(ids) == 1
    assert [(row["_step"], row["share/fc1"]) for row in history] == [
        (r["round"], r["share"][0]) for r in rows
    ]
    assert history[1]["_timestamp"] - history[0]["_timestamp"] == pytest.approx(1.0)
    for name in ("guarantee", "epsilon", "attack"):
        assert summary[name] == result[name]
    assert summary["attack_rates.tpr.0.01"] == result["attack_rates"]["tpr"]["0.01"]
    assert config["mechanism.name"] == "snr-consistent"


def _logged(log: bytes) -> Iterator[bytes]:
    """Records of a W&B log, which is one of LevelDB: blocks of 32 KiB, records in pieces with
    headers of 7 bytes."""
    position, record = 7, b""  # after the name of the format
    while position + 7 <= len(log):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        length, kind = int.from_bytes(log[position + 4 : position + 6], "little"), log[position + 6]
        record += log[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""
