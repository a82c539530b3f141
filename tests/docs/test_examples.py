"""The examples of the documentation. `tests/test_packaging.py` runs others as they stand."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pandas
import pytest

from fedlgm_lab.reports.report import write_report

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def test_an_existing_flower_app_becomes_private_in_few_lines() -> None:
    app = EXAMPLES / "existing_flower_app"
    lines = [line for line in (app / "app.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 30


@pytest.mark.usefixtures("undrawn")
def test_heart_disease_of_four_hospitals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On made files in UCI's format: patients without chest pain are the ill ones."""
    random = np.random.default_rng(0)
    for hospital in ("cleveland", "hungarian", "switzerland", "va"):
        ill = random.integers(0, 2, 60)
        lines = [
            f"{random.integers(30, 70)},1,{4 if sick else 2},?,0,0,1,150,0,.5,?,?,?,{3 * sick}"
            for sick in ill
        ]
        if hospital == "cleveland":  # as on Kaggle: a byte order mark, a header, other codes
            lines = [
                f"{random.integers(30, 70)},1,{0 if sick else 1},?,0,0,1,150,0,.5,?,?,?,{1 - sick}"
                for sick in ill
            ]
            lines.insert(
                0,
                "\ufeffage,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,target",
            )
        (tmp_path / f"processed.{hospital}.data").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["heart_disease.py", str(tmp_path), "2"])
    runpy.run_path(str(EXAMPLES / "heart_disease.py"))
    printed = capsys.readouterr().out
    assert 0.95 < float(re.search(r"AUC (\S+)", printed)[1]) <= 1  # type: ignore[index]
    assert re.search(r"epsilon 2; an attacker who accepts 1 % false alarms", printed)
    assert re.search(r"no_pain +[1-9]", printed)
    sizes = [len(pandas.read_csv(file)) for file in sorted(tmp_path.glob("sites/*.csv"))]
    assert sizes == [48] * 4
    assert len(pandas.read_csv(tmp_path / "test.csv")) == 48
    (run,) = tmp_path.glob("runs/*")
    report = Path(write_report(run)["report"]).read_text(encoding="utf-8")
    for name in ("cleveland", "hungarian", "switzerland", "va"):
        assert f">{name}</th><td>in each of the 100 rounds, the sum" in report


def test_the_page_shows_the_kept_figures_of_heart_disease() -> None:
    kept = json.loads((EXAMPLES.parent / "results/heart-disease.json").read_text())
    page = (EXAMPLES.parent / "how-to/tables.md").read_text(encoding="utf-8")
    assert kept["rows"] == {"train": 735, "test": 185}
    for epsilon in (1, 4):
        runs = [run["auc"] for run in kept["runs"] if run["epsilon"] == epsilon]
        assert len(runs) == 5
        shown = f"| {epsilon} | {100 * np.mean(runs):.1f} ({100 * min(runs):.1f} to"
        assert f"{shown} {100 * max(runs):.1f}) |" in page
    assert f"| none | {100 * kept['pooled']['auc']:.1f} |" in page
