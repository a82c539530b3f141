"""The privacy-utility-attack table: repetitions side by side."""

from __future__ import annotations

from simulations.attacks.table import cells, main_table, reconstruction_table


def row(repetition: int, ssim: float, distance: float, agreement: float) -> dict:
    found = {"distance": distance, "agreement": agreement, "nearest_class": 209.0, "floor": 5.0, "accuracy": 0.9}
    return {
        "method": "gaussian", "epsilon_budget": 8.0, "partition": "iid", "repetition": repetition, "accuracy": 0.9,
        "epsilon": 8.0, "claimed_epsilon": 8.0, "delta": 1e-5, "guarantee": "proven", "guarantee_status": "proven",
        "inversion_ssim": ssim, "gan": {"3": found},
    }  # fmt: skip


def test_two_repetitions_show_mean_and_spread():
    made = cells([row(0, 0.1, 80.0, 0.9), row(1, 0.3, 100.0, 1.0)])
    assert main_table(made)[1][0][-1] == "0.20 ± 0.14"
    header, body = reconstruction_table(made)
    assert header == ["budget", "method", "class 3"]
    assert body[0] == ["8", "gaussian", "90 ± 14 (95 ± 7 %)"]
    assert body[1:] == [["-", "(another class)", "209"], ["-", "(private images)", "5"]]


def test_one_repetition_has_no_spread():
    made = cells([row(0, 0.1, 80.0, 0.9)])
    assert main_table(made)[1][0][-1] == "0.10"
    assert reconstruction_table(made)[1][0][-1] == "80 (90%)"
