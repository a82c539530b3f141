"""A run whose server step gives NaN or infinity ends with one message and keeps what was there
before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diverging import install

from fedlgm.errors import ConfigError, DivergedError, RunError
from fedlgm.privacy.ledger import Ledger
from simulations import launch
from simulations.config.recipe import Recipe
from simulations.runs.folder import RunFolder

MESSAGE = r"training diverged in round 3: .* of the model's .* values are NaN or infinite; .*federation\.server_lr"


@pytest.fixture
def diverging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Recipe]
) -> Recipe:
    """A recipe of five rounds of which the third diverges; a checkpoint is made every ten."""
    install(tmp_path / "modules", monkeypatch)
    return tiny(
        federation={"rounds": 5, "server_optimizer": "my_diverging:Step"},
        run={"checkpoint_every": 10},
    )


def check(folder: RunFolder) -> None:
    """Two rounds are there with finite figures, the third is charged, and the last model can be
    gone on from."""
    rows = folder.rows()
    assert [row["round"] for row in rows] == [1, 2]
    assert all(np.isfinite(row["loss"]) for row in rows)
    assert folder.result() is None
    assert folder.checkpoints.rounds() == 2
    folder.verify()
    with Ledger(folder.ledger_file) as ledger:
        assert ledger.rounds() == 3  # it was released before the step


@pytest.mark.parametrize("seed", [3, None])
def test_a_run_stops_and_keeps_its_rounds(
    diverging: Recipe, tmp_path: Path, seed: int | None
) -> None:
    recipe = diverging.model_copy(update={"run": diverging.run.model_copy(update={"seed": seed})})
    with pytest.raises(DivergedError, match=MESSAGE) as first:
        launch.simulate(recipe, run_dir=tmp_path / "run")
    assert str(tmp_path / "run") in str(first.value)
    folder = RunFolder.open(tmp_path / "run")
    check(folder)
    with Ledger(folder.ledger_file) as ledger:
        spent = ledger.epsilon(1e-5, "rdp")
    with pytest.raises(DivergedError, match=MESSAGE):  # the same step from the same model
        launch.resume(tmp_path / "run")
    check(folder)
    with Ledger(folder.ledger_file) as ledger:
        assert ledger.epsilon(1e-5, "rdp") == spent
    with pytest.raises(RunError, match=r"is not finished: training diverged in round 3"):
        folder.verified_result()


def test_a_step_that_was_put_right_goes_on(
    diverging: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import my_diverging

    with pytest.raises(DivergedError):
        launch.simulate(diverging, run_dir=tmp_path / "run")
    monkeypatch.setattr(my_diverging.Step, "step", lambda self, model, mean: model + mean)
    result = launch.resume(tmp_path / "run")
    assert result["rounds"] == 5
    assert RunFolder.open(tmp_path / "run").diverged.read() is None
    plain = diverging.federation.model_copy(update={"server_optimizer": "sgd"})
    told = launch.simulate(
        diverging.model_copy(update={"federation": plain}), run_dir=tmp_path / "plain"
    )
    assert (
        told["model_sha256"] == result["model_sha256"]
    )  # nothing of the round that diverged stayed


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "flower"])
def test_every_engine_says_so(diverging: Recipe, tmp_path: Path, engine: Any) -> None:
    with pytest.raises(DivergedError, match=MESSAGE) as raised:
        launch.simulate(diverging, run_dir=tmp_path / "run", engine=engine, workers=1)
    assert "End of its log" not in str(raised.value)
    check(RunFolder.open(tmp_path / "run"))


def test_a_step_that_never_gives_a_model_is_refused_before_anything_is_written(
    diverging: Recipe, tmp_path: Path
) -> None:
    federation = diverging.federation.model_copy(update={"server_optimizer": "my_diverging:AtOnce"})
    with pytest.raises(
        ConfigError, match=r"^server optimizer 'my_diverging:AtOnce': .* NaN or infinite"
    ):
        launch.simulate(
            diverging.model_copy(update={"federation": federation}), run_dir=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


def test_the_command_says_what_to_change_and_not_to_go_on(
    diverging: Recipe, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    file = tmp_path / "diverging.toml"
    file.write_text(diverging.to_toml())
    status, out, err = run("simulate", file, "--engine", "local", "--run-dir", tmp_path / "run")
    said = err.replace("\n", " ")
    assert (status, out) == (2, "")
    assert "training diverged in round 3" in said
    assert "federation.server_lr" in said
    assert "Traceback" not in said
    assert "--resume" not in said
    status, out, err = run("report", tmp_path / "run")
    assert (status, out) == (2, "")
    assert "is not finished: training diverged in round 3" in err.replace("\n", " ")
