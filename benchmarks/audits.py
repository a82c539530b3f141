"""Long form of the audits: `python -m benchmarks.audits` (about half an hour on a core; `--quick`: ten minutes).

1. Every registered mechanism at epsilon 1, 4 and 8, and the published variants that must be caught.
2. Tightness in one training run: flat and SNR-consistent noise on the digits federation, canaries in the run.
3. False alarms over a thousand audits of releases that are exactly as planned, at confidence 0.95 and 0.999.
4. What canaries cost: their share of a round's time.

Writes docs/results/audits.md, or prints it with `--print`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fedlgm import mechanisms
from fedlgm.audits import Audit, Canaries, Subject
from fedlgm.audits.one_run import release_ratio
from fedlgm.keys import KeyRing
from fedlgm.layers import LayerTable
from fedlgm.release import release
from simulations import launch
from simulations.audits.canaries import LoggedCanaries
from simulations.config import recipe as recipes

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "audits.md"
PUBLISHED = ("uniform", "snr-consistent", "ladp")


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def every_mechanism(epsilons: tuple[float, ...], trials: int) -> list[str]:
    rows = []
    cases = [(name, "sound") for name in mechanisms.names() if name != "none"]
    for name, variant in [*cases, *((name, "published") for name in PUBLISHED)]:
        cells, method = [], ""
        for epsilon in epsilons:
            subject = Subject.of(name, variant, epsilon=epsilon)
            result = Audit(seed=0, trials=trials).mechanism(subject)
            method = result.method
            shown = f"{result.epsilon_lower:.2f} of {result.epsilon_reported:.3g}"
            cells.append(shown if result.passed else f"**{shown}: caught**")
        rows.append([name if variant == "sound" else f"{name} ({variant})", method, *cells])
        print(rows[-1], flush=True)
    return table(["mechanism", "method", *(f"epsilon {epsilon:g}" for epsilon in epsilons)], rows)


def tightness(epsilons: tuple[float, ...], seeds: tuple[int, ...]) -> list[str]:
    rows = []
    for name in ("gaussian", "snr-consistent"):
        for epsilon in epsilons:
            shares, accuracies = [], []
            for seed in seeds:
                result = simulate([f"mechanism.name={name}", f"privacy.epsilon={epsilon}", f"run.seed={seed}"], True)
                shares.append(result["audited_epsilon"] / result["epsilon"])
                accuracies.append(result["accuracy"])
            spread = ", ".join(f"{share:.3f}" for share in shares)
            rows.append([name, f"{epsilon:g}", spread, f"{100 * statistics.mean(accuracies):.1f} %"])
            print(rows[-1], flush=True)
    return table(["mechanism", "proven epsilon", "audited / proven, per seed", "mean accuracy"], rows)


def simulate(overrides: list[str], audit: bool) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        recipe = recipes.load("digits", [*overrides, f"run.audit={str(audit).lower()}", "run.evaluate_every=50"])
        return launch.simulate(recipe, run_dir=Path(directory) / "run")


def false_alarms(audits: int) -> list[str]:
    layers = LayerTable.from_sizes({"a": 40, "b": 600, "c": 160})
    rows = []
    for name in ("gaussian", "snr-consistent"):
        subject = Subject.of(name, rounds=1, layers=layers)
        plan = subject.method.plan(subject.start)
        keys, above = KeyRing.from_seed(1), {0.95: 0, 0.999: 0}
        for number in range(audits):
            canaries = Canaries(subject.layers, 24, KeyRing(number))
            total = torch.zeros(plan.size, dtype=torch.float64)
            canaries.insert(1, plan, total)
            canaries.observe(1, plan, release(total, plan, keys, number + 1))
            for confidence in above:
                above[confidence] += release_ratio(canaries.record(), confidence) > 1
        rows.append([name, f"{audits:,}", *(str(count) for count in above.values())])
        print(rows[-1], flush=True)
    return table(["mechanism", "audits", "above the truth at 0.95", "at 0.999"], rows)


def cost(runs: int) -> list[str]:
    """Share of the rounds' time that goes to the canaries, in the same run, so that other load hits both alike."""
    spent: list[float] = []

    def timed(method: Callable) -> Callable:
        def call(self, *args, **kwargs):
            started = time.perf_counter()
            method(self, *args, **kwargs)
            spent[-1] += time.perf_counter() - started

        return call

    insert, observe = LoggedCanaries.insert, LoggedCanaries.observe
    LoggedCanaries.insert, LoggedCanaries.observe = timed(insert), timed(observe)
    rows = []
    try:
        for label, overrides in {
            "digits, mlp (2,410 parameters)": [],
            "digits, cohort 25": ["federation.rate=0.05"],
        }.items():
            shares = []
            for _ in range(runs):
                spent.append(0.0)
                result = simulate(overrides, True)
                shares.append(spent[-1] / (result["seconds_per_round"] * result["rounds"]))
            rows.append(
                [label, f"{100 * statistics.median(shares):.2f} %", ", ".join(f"{100 * s:.2f}" for s in shares)]
            )
            print(rows[-1], flush=True)
    finally:
        LoggedCanaries.insert, LoggedCanaries.observe = insert, observe
    return table(["run", "share of the rounds' time (median)", "runs"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one epsilon per mechanism, one seed, fewer trials")
    parser.add_argument("--print", action="store_true", help="do not write docs/results/audits.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    quick = given.quick
    epsilons = (4.0,) if quick else (1.0, 4.0, 8.0)
    parts = {
        "Every mechanism": every_mechanism(epsilons, 2000 if quick else 4000),
        "Tightness in one training run": tightness((4.0, 8.0), (1,) if quick else (1, 2, 3)),
        "False alarms": false_alarms(1000),
        "Cost of canaries in a run": cost(1 if quick else 3),
    }
    how = " --quick" if quick else ""
    text = f"# Audits\n\nMade by `python -m benchmarks.audits{how}`. Lower bounds at confidence 0.999, delta = 1e-5.\n"
    notes = {
        "Every mechanism": "Audited of reported epsilon. Counting errors shows at most ln(trials) or so; "
        "canary-aligned sums (one-run-gaussian) have no such limit. 2,100 coordinates, made-up updates, 4 rounds (1 if "
        "single releases are audited).",
        "Tightness in one training run": "The default recipe (500 clients, 100 rounds, rate 0.1), run.audit = true.",
        "False alarms": "Releases exactly as planned; a false alarm is a noise ratio above 1. 5 and 0.1 % are "
        "what the confidences allow.",
        "Cost of canaries in a run": "Time in `insert` and `observe` over the median round's time, all in one run.",
    }
    for title, lines in parts.items():
        text += f"\n## {title}\n\n{notes[title]}\n\n" + "\n".join(lines) + "\n"
    if given.print:
        print(text)
    else:
        RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
