"""The privacy-utility-attack table: repetitions side by side."""

from __future__ import annotations

import io

from rich.console import Console

from fedlgm_lab.attacks.runs.table import (
    _inception,
    cells,
    main_table,
    reconstruction_table,
    tables,
)


def attacked(*runs: dict) -> list[dict]:
    """The one cell of runs with these attacks."""
    keys = {"method": "gaussian", "epsilon_budget": 8.0, "partition": "iid"}
    spent = {
        "epsilon": 8.0,
        "claimed_epsilon": 8.0,
        "guarantee": "proven",
        "guarantee_status": "proven",
    }
    figures = {"accuracy": 0.9, "accuracy_std": 0.0, "seeds": len(runs)}
    rows = [keys | {"folder": str(number)} for number in range(len(runs))]
    summary = {"cells": [keys | spent | figures], "runs": rows, "headline": "accuracy"}
    return cells(summary, [{"folder": str(number)} | run for number, run in enumerate(runs)])


def row(ssim: float, distance: float, agreement: float, **further: float) -> dict:
    found = {
        "distance": distance,
        "agreement": agreement,
        "nearest_class": 209.0,
        "floor": 5.0,
        "accuracy": 0.9,
    }
    return {"inversion_ssim": ssim, "gan": {"3": found | further}}


def test_two_repetitions_show_mean_and_spread():
    made = attacked(row(0.1, 80.0, 0.9), row(0.3, 100.0, 1.0))
    assert main_table(made)[1][0][-1] == "0.20 ± 0.14"
    header, body = reconstruction_table(made)
    assert header == ["budget", "method", "class 3"]
    assert body[0] == ["8", "gaussian", "90 ± 14 (95 ± 7 %)"]
    assert body[1:] == [["-", "(another class)", "209"], ["-", "(private images)", "5"]]


def test_inception_distances_are_a_second_table():
    made = attacked(
        *(row(0.1, 80.0, 0.9, inception_distance=d, inception_floor=10.0) for d in (200, 220))
    )
    shown = io.StringIO()
    Console(file=shown, width=200).print(tables(made))
    assert "Their Frechet Inception distance" in shown.getvalue()
    assert "210.0 ± 14.1 (private images: 10.0)" in shown.getvalue()
    once = attacked(row(0.1, 80.0, 0.9, inception_distance=200.0, inception_floor=10.0))
    assert reconstruction_table(once, _inception)[1] == [
        ["8", "gaussian", "200.0 (private images: 10.0)"]
    ]


def test_one_repetition_has_no_spread():
    made = attacked(row(0.1, 80.0, 0.9))
    assert main_table(made)[1][0][-1] == "0.10"
    assert reconstruction_table(made)[1][0][-1] == "80 (90 %)"
