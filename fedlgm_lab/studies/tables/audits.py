"""The full audits, which take about forty minutes on one core.

1. Audits of every registered mechanism at epsilon 1, 4 and 8, and of the published variants that
must be caught. 2. Tightness of the audit of one training run with canaries, for flat and
SNR-consistent noise on the digits federation. 3. False alarms on releases that are exactly as
planned. There are two thousand single releases of
   each mechanism, at confidence 0.95 and 0.999, two thousand audits of four rounds, a thousand
   audits of twelve rounds with correlated noise, and 300 audits by the command `fedlgm audit`.
4. The cost of canaries, as a share of a round's time.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import scipy.stats

from fedlgm import mechanisms
from fedlgm.mechanisms.method import Method
from fedlgm.noise import correlation
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm_lab.audits import Audit, AuditResult, Subject, audit_record
from fedlgm_lab.audits.audit import reported_of, watch
from fedlgm_lab.audits.one_run import release_ratio
from fedlgm_lab.audits.runs.canaries import LoggedCanaries
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.store import OutOfTimeError, Values, simulated

TIGHT = (
    ("digits", "gaussian"),
    ("digits", "snr-consistent"),
    ("correlated-digits", "snr-consistent"),
)
PUBLISHED = ("uniform", "snr-consistent", "ladp", "lm-dp-sgd")
SIZES = {"a": 40, "b": 600, "c": 160}
SEPARATION = 4  # rounds between a client's participations in the audits of correlated noise

AUDITS, RUNS, COMMANDS, BATCH = 2000, 1000, 300, 50
"""For false alarms: number of audits of separate releases, number of audits of complete runs,
number of commands, and number of audits that are stored at a time.
"""


def every_mechanism(store: Values, epsilons: tuple[float, ...], trials: int) -> str:
    """Audit every registered mechanism, and the published variants that must be caught."""

    def bound(name: str, variant: str, epsilon: float) -> list[Any]:
        subject = Subject.of(name, variant, epsilon=epsilon)
        result = Audit(seed=0, trials=trials).mechanism(subject)
        return [result.epsilon_lower, result.epsilon_reported, result.passed, result.method]

    rows = []
    cases = [(name, "sound") for name in mechanisms.names(None) if mechanisms.is_private(name)]
    for name, variant in [*cases, *((name, "published") for name in PUBLISHED)]:
        cells, method = [], ""
        for epsilon in epsilons:
            key = f"{name} {variant} {epsilon:g} {trials}"
            lower, reported, passed, method = store.get(key, partial(bound, name, variant, epsilon))
            shown = f"{lower:.2f} of {reported:.3g}"
            cells.append(shown if passed else f"**{shown}: caught**")
        rows.append([name if variant == "sound" else f"{name} ({variant})", method, *cells])
    return table(["mechanism", "method", *(f"epsilon {epsilon:g}" for epsilon in epsilons)], rows)


def tightness(store: Values, epsilons: tuple[float, ...], seeds: tuple[int, ...]) -> str:
    """Measure the ratio of the audited to the proven epsilon in training runs with canaries."""

    def run(recipe: str, name: str, epsilon: float, seed: int) -> list[Any]:
        changes = {"mechanism.name": name, "privacy.epsilon": epsilon, "run.seed": seed}
        result = audited_run(recipe, changes)
        keys = ("audited_epsilon", "epsilon", "accuracy", "audit_passed")
        return [result[key] for key in keys]

    rows = []
    for recipe, name in TIGHT:
        for epsilon in epsilons:
            key, measure = f"{recipe} {name} {epsilon:g}", partial(run, recipe, name, epsilon)
            found = [
                store.get(f"tightness {key} seed {seed}", partial(measure, seed)) for seed in seeds
            ]
            spread = ", ".join(
                f"{row[0] / row[1]:.3f}{'' if row[3] else ' (FAILED)'}" for row in found
            )
            accuracy = statistics.mean(row[2] for row in found)
            rows.append([recipe, name, f"{epsilon:g}", spread, f"{100 * accuracy:.1f} %"])
    header = ["recipe", "mechanism", "proven epsilon", "audited / proven, per seed"]
    return table([*header, "mean accuracy"], rows)


def audited_run(recipe: str, changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Make a run with canaries, and return its summary."""
    watched = {**changes, "run.audit": True, "run.evaluate_every": 50}
    with simulated(recipe, overrides=watched) as result:
        return dict(result)


def false_alarms(store: Values, audits: int, runs: int, commands: int) -> str:
    failed, whole = 0, 0

    def count(key: str, of: int, measure: Callable[[range], list[int]]) -> list[str]:
        """Format the counts of each column; the last column counts complete audits that failed."""
        nonlocal failed, whole
        batches = [
            store.get(f"{key} {n.start}-{n.stop}", partial(measure, n)) for n in _batches(of)
        ]
        counts = np.sum(batches, axis=0)
        failed, whole = failed + int(counts[-1]), whole + of
        return [f"{count} of {of:,}" for count in counts]

    rows = []
    for name in ("gaussian", "snr-consistent"):
        exact = count(f"false alarms {name}", audits, partial(exact_releases, name))
        command = count(
            f"false alarms of the command {name}", commands, partial(failed_commands, name)
        )
        rows.append([name, *exact, *command])
    rows.append(
        [
            "snr-consistent, correlated noise",
            "-",
            "-",
            *count("false alarms correlated", runs, exact_runs),
            "-",
        ]
    )
    header = [
        "ratio above 1 at 0.95",
        "at 0.999",
        "audits of several rounds that failed",
        "commands that failed",
    ]
    low, high = (
        1000 * x for x in scipy.stats.binomtest(failed, whole).proportion_ci(method="exact")
    )
    together = (
        f"Of all {whole:,} complete audits {failed} failed: {1000 * failed / whole:.1f} in a "
        f"thousand (95 % interval {low:.1f} to {high:.1f})."
    )
    return f"{table(['mechanism', *header], rows)}\n\n{together}"


def _batches(count: int) -> list[range]:
    return [range(first, min(first + BATCH, count)) for first in range(0, count, BATCH)]


def exact_releases(name: str, numbers: range) -> list[int]:
    """Audit releases that are exactly as planned. Count the ratios above 1 at confidence 0.95 and
    at 0.999, and the failed audits of four rounds.
    """
    layers = LayerTable.from_sizes(SIZES)
    single, several = (Subject.of(name, rounds=rounds, layers=layers) for rounds in (1, 4))
    above = [0, 0, 0]
    for number in numbers:
        record = watch(single, 24, "release", number)
        for index, confidence in enumerate((0.95, 0.999)):
            above[index] += release_ratio(record, single.layers, confidence) > 1
        above[2] += not audit(several, 100, number).passed
    return above


def exact_runs(numbers: range) -> list[int]:
    """Count the failed audits of complete runs that are exactly as planned.

    The runs have banded noise over twelve rounds, and clients in groups that take turns.
    """
    noise = correlation.get("banded", 3 * SEPARATION, bands=SEPARATION)
    sampling = Sampling("cyclic", 10 * SEPARATION, 1 / SEPARATION, SEPARATION)
    facts = RunFacts(0.0, sampling, rounds=noise.rounds, epsilon=4.0, delta=1e-5, noise=noise)
    of = Subject(
        "run",
        Method.calibrate(mechanisms.get("snr-consistent"), LayerTable.from_sizes(SIZES), facts),
    )
    return [sum(not audit(of, 100, number).passed for number in numbers)]


def audit(of: Subject, count: int, number: int) -> AuditResult:
    """Make the complete audit of a run whose releases are exactly as planned."""
    reported = reported_of(of, of.method.plan(of.start))
    return audit_record(watch(of, count, "release", number), of.layers, reported)


def failed_commands(name: str, numbers: range) -> list[int]:
    """Count the audits of a sound mechanism that fail, made as by `fedlgm audit NAME --seed N`."""
    subject = Subject.of(name)
    return [sum(not Audit(seed=number).mechanism(subject).passed for number in numbers)]


def cost(store: Values, runs: int) -> str:
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "digits, mlp (2,410 parameters)": ("digits", {}),
        "digits, cohort 25": ("digits", {"federation.rate": 0.05}),
        "correlated-digits": ("correlated-digits", {}),
    }
    rows = []
    for label, case in cases.items():
        names = [f"cost {label} {run}" for run in range(runs)]
        shares = [100 * store.get(name, partial(share_of_canaries, *case)) for name in names]
        each = ", ".join(f"{share:.2f}" for share in shares)
        rows.append([label, f"{statistics.median(shares):.2f} %", each])
    return table(["run", "share of the rounds' time (median)", "runs"], rows)


def share_of_canaries(recipe: str, changes: Mapping[str, Any]) -> float:
    """Measure the share of the rounds' time that the canaries take. Both times come from the same
    run, so that other load on the machine affects both equally.
    """
    spent = 0.0

    def time_calls(method: Callable) -> Callable:
        def call(self, *args, **kwargs):
            nonlocal spent
            started = time.perf_counter()
            method(self, *args, **kwargs)
            spent += time.perf_counter() - started

        return call

    insert, observe = LoggedCanaries.insert, LoggedCanaries.observe
    LoggedCanaries.insert, LoggedCanaries.observe = time_calls(insert), time_calls(observe)
    try:
        result = audited_run(recipe, changes)
    finally:
        LoggedCanaries.insert, LoggedCanaries.observe = insert, observe
    return spent / (result["seconds_per_round"] * result["rounds"])


PARTS: dict[str, Callable[[Values], str]] = {
    "every mechanism": lambda store: every_mechanism(store, (1.0, 4.0, 8.0), 4000),
    "tightness": lambda store: tightness(store, (4.0, 8.0), (1, 2, 3)),
    "false alarms": lambda store: false_alarms(store, AUDITS, RUNS, COMMANDS),
    "cost of canaries": lambda store: cost(store, 3),
}


def measure(store: Values) -> None:
    """Make all four parts."""
    for part in PARTS.values():
        part(store)


def texts(store: Values) -> Pages:
    """Make the tables of the parts that are complete."""
    complete, shown = Values(store.path, {"minutes": 0}), {}
    for name, part in PARTS.items():
        with contextlib.suppress(OutOfTimeError):
            shown[name] = part(complete)
    data = {name: text for name, text in shown.items() if name == "every mechanism"}
    rest = {name: text for name, text in shown.items() if name not in data}
    return {"audits.md": rest, "data/audits.md": data}


MAKER = Maker("long-audits.json", texts, measure, Values, partial=True)
