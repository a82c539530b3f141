"""Time that workers and a second call save in a study: `python -m benchmarks.study_workers [--write]`.

The benchmark needs an idle machine; `--turns 1 --rounds 2` is a short trial.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from fedlgm_lab.studies.study import study
from fedlgm_lab.studies.tables.pages import put

KEPT = Path(__file__).parents[1] / "docs" / "results" / "study-ratios.json"


def ratios(turns: int, rounds: int) -> dict[str, Any]:
    """Measure the seconds of a study of 2 mechanisms x 2 budgets x 3 seeds with one worker, with
    two workers and in a second call.

    The three measurements alternate, and each turn has new folders. The second call reads what the
    first call has written.

    Args:
        turns: repetitions.
        rounds: rounds of each run.
    """
    grid = {"mechanism": ["uniform", "snr-consistent"], "privacy.epsilon": [8.0, 2.0]}
    changes = {"federation.rounds": rounds, "run.evaluate_every": rounds}
    seconds: dict[str, list[float]] = {"one": [], "two": [], "again": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(turns):
            made = {}
            for name, workers, place in (("one", 1, "one"), ("two", 2, "two"), ("again", 1, "one")):
                began = time.perf_counter()
                out = Path(folder) / f"{turn}-{place}"
                done = study(
                    "digits",
                    grid=grid,
                    workers=workers,
                    folder=out,
                    overrides=changes,
                    progress=False,
                )
                made[name] = done.to_frame().drop(columns=["seconds", "folder"])
                seconds[name].append(time.perf_counter() - began)
            if not (made["one"].equals(made["two"]) and made["one"].equals(made["again"])):
                raise AssertionError("the frames differ")
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "two_workers": middle["two"] / middle["one"],
        "second_call": middle["again"] / middle["one"],
        "aims": {"two_workers": 0.6, "second_call": 1 / 3},
        "runs": 12,
        "rounds": rounds,
        "turns": turns,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "seconds": seconds,
    }


def saved(figures: dict[str, Any]) -> str:
    """Return the sentence of the page about the time of a study with two workers and of a second
    call.
    """
    return (
        f"On {figures['cores']} cores a study of {figures['runs']} runs of {figures['rounds']} "
        f"rounds took {figures['two_workers']:.2f} times as long with two workers as with one, and "
        f"a second call {figures['second_call']:.2f} times as long (medians of {figures['turns']} "
        "turns; equal frames). The command is `python -m benchmarks.study_workers` "
        "([data](study-ratios.json))."
    )


def main() -> None:
    """Run the benchmark that the module describes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--write", action="store_true", help="keep the figures, write the page")
    options = parser.parse_args()
    figures = ratios(options.turns, options.rounds)
    print(json.dumps(figures, indent=1))
    if options.write:
        KEPT.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        put(KEPT.with_name("studies.md"), "saved", saved(figures))


if __name__ == "__main__":
    main()
