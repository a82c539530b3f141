"""Correlated noise: the gain of the models and the cost of a round.

    python -m benchmarks.correlated [--write]    # closed forms, kept in
    docs/results/correlated.json python -m benchmarks.correlated --cost       # times, printed only

Closed forms:

* errors of the models over those of independent noise: without amplification, clients at least b
  rounds apart in both; and with groups and secret draws in them, against Poisson sampling of all
  clients;
* gain of a separate C for every layer over the best one for all, if the server treated layers
  differently;
* errors for a server with momentum.

Times:

* processor milliseconds of a round's noise with 10 bands over those of independent noise, one core,
  and the memory kept; beside them those of one batch of 32 examples on a client, and the whole
  round of ten clients with ten batches each, as their sum;
* processor seconds of whole rounds of `fashion-mnist` with either noise, one core (`--rounds 0`
  skips them).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize

from benchmarks.kept import Values
from benchmarks.pages import show, table
from fedlgm import mechanisms
from fedlgm.mechanisms.method import Method
from fedlgm.noise import correlation
from fedlgm.noise.correlation import CorrelatedStream, Correlation, Workload
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import release
from fedlgm.noise.run_noise import RunNoise
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy import calibrate
from fedlgm.privacy.whole_run import WholeRun
from fedlgm.training import models
from fedlgm.training.devices import torch_threads

RESULTS = Path(__file__).parent.parent / "docs" / "results"
KEPT, PAGE = RESULTS / "correlated.json", RESULTS / "data" / "correlated.md"
BANDS, ROUNDS, DELTA = 10, 300, 1e-5
BUDGETS, GROUPS = (1.0, 3.0, 8.0, 16.0), (2, 4, 5, 10)
MODELS = {
    "CNN, FashionMNIST": ("cnn", (1, 28, 28)),
    "CNN, CIFAR-10": ("cifar-cnn", (3, 32, 32)),
    "ResNet-18": ("resnet18", (3, 32, 32)),
}

Row = dict[str, Any]


def noise_cost(repeats: int) -> list[Row]:
    """A whole release (drawing, correlating, adding, rounding) per round, once the past is as long
    as it gets.
    """
    rows = []
    for name, (kind, shape) in MODELS.items():
        module = models.build(kind, in_shape=shape, classes=10)
        layers = LayerTable.from_module(module)
        jobs = [
            _releases(layers, noise)
            for noise in (None, correlation.get("banded", ROUNDS, bands=BANDS))
        ]
        with torch_threads(1):
            for _ in range(BANDS):
                jobs[1]()
            independent, correlated = interleaved(jobs, repeats)
            batch = interleaved(
                [lambda module=module, shape=shape: step(module, shape)], max(1, repeats // 5)
            )[0]
        stream = CorrelatedStream(correlation.get("banded", ROUNDS, bands=BANDS), layers.size)
        memory = sum(
            value.nbytes for value in vars(stream).values() if isinstance(value, torch.Tensor)
        )
        rows.append(
            {
                "model": name,
                "parameters": layers.size,
                "independent_ms": 1e3 * independent,
                "correlated_ms": 1e3 * correlated,
                "ratio": correlated / independent,
                "batch_ms": 1e3 * batch,
                "round_ratio": (correlated + 100 * batch) / (independent + 100 * batch),
                "memory_mb": memory / 1e6,
                "vectors": memory / (4 * layers.size),
            }
        )
    return rows


def step(module: torch.nn.Module, shape: tuple[int, ...]) -> None:
    """Forward and backward pass of one batch of 32 examples."""
    x, y = torch.zeros(32, *shape), torch.zeros(32, dtype=torch.long)
    torch.nn.functional.cross_entropy(module(x), y).backward()


def _releases(layers: LayerTable, noise: Correlation | None) -> Callable[[], None]:
    facts = RunFacts(1.5, Sampling("poisson", 500, 0.1), rounds=ROUNDS)
    if noise is not None:
        facts = replace(facts, sampling=Sampling("cyclic", 500, 0.1, BANDS), noise=noise)
    method = Method(mechanisms.get("snr-consistent"), layers, facts)
    plan = method.plan(Transcript.start(torch.zeros(layers.size)))
    total, keys, run_noise, round = (
        torch.zeros(plan.size, dtype=torch.float64),
        KeyRing(1),
        RunNoise(),
        0,
    )

    def one() -> None:
        nonlocal round
        own = plan if noise is None else replace(plan, position=round)
        round += 1
        release(total, own, keys, round, run_noise=run_noise)

    return one


def whole_rounds(rounds: int) -> Row:
    """Rounds of `fashion-mnist` (500 clients in groups that take turns, 50 a round) in this
    process, taken in turn.
    """
    from flwr.app import ConfigRecord

    from benchmarks.in_process import served
    from simulations.config import recipe as recipes
    from simulations.config.assembly import Assembly

    def runner(noise: str, directory: Path) -> Callable[[], None]:
        assembly = Assembly(
            recipes.load("fashion-mnist", ["federation.sampling=cyclic", f"privacy.noise={noise}"])
        )
        strategy, grid = served(assembly, directory / f"{noise}.sqlite")
        number, arrays = 0, strategy.initial_arrays()

        def one() -> None:
            nonlocal number, arrays
            number += 1
            replies = grid.send_and_receive(
                strategy.configure_train(number, arrays, ConfigRecord(), grid)
            )
            arrays = strategy.aggregate_train(number, replies)[0] or arrays

        return one

    with tempfile.TemporaryDirectory() as directory:
        jobs = [runner(noise, Path(directory)) for noise in ("independent", "banded")]
        with torch_threads(1):
            independent, correlated = interleaved(jobs, rounds)
    return {
        "rounds": rounds,
        "independent_seconds": independent,
        "correlated_seconds": correlated,
        "ratio": correlated / independent,
    }


def without_amplification() -> list[Row]:
    """Clients at least b rounds apart under either noise, so that both have the same sensitivity,
    sqrt(T / b).
    """
    rows = []
    independent = correlation.get("identity", ROUNDS)
    for separation in (5, 10, 20, 50):
        row: Row = {"rounds": ROUNDS, "min_separation": separation}
        for reduce in ("mean", "max"):
            c = correlation.get("banded", ROUNDS, bands=separation, reduce=reduce)
            costs = [
                each.sensitivity(separation) * each.error(reduce=reduce)
                for each in (c, independent)
            ]
            row[reduce] = costs[0] / costs[1]
        blt = correlation.get("blt", ROUNDS, min_separation=separation)
        row["blt_mean"] = (
            blt.sensitivity(separation)
            * blt.error()
            / (independent.sensitivity(separation) * independent.error())
        )
        row["floor"] = separation**-0.5
        rows.append(row)
    return rows


def against_poisson() -> list[Row]:
    """At q = 0.1. Ten groups are a public cycle: only the noise is secret."""
    rows = []
    independent = correlation.get("identity", ROUNDS)
    for epsilon in BUDGETS:
        poisson = calibrate(epsilon, DELTA, steps=ROUNDS, sampling_rate=0.1)
        for b in GROUPS:
            row: Row = {"epsilon": epsilon, "groups": b}
            for reduce in ("mean", "max"):
                c = correlation.get("banded", ROUNDS, bands=b, reduce=reduce)
                sampling = Sampling("grouped-poisson", 500, 0.1, b)
                row["multiplier"] = WholeRun(c, sampling, "add-remove").calibrate(
                    epsilon, DELTA, "pld"
                )
                row[reduce] = (
                    row["multiplier"]
                    * c.error(reduce=reduce)
                    / (poisson * independent.error(reduce=reduce))
                )
            rows.append(row)
    return rows


def workloads() -> list[Row]:
    """Mean error for a server with momentum, 10 bands: the C made for them and that for prefix
    sums.
    """
    rows = []
    for name, workload in {"momentum 0.9": Workload(0.9)}.items():
        made = correlation.get("banded", ROUNDS, bands=BANDS, workload=workload)
        prefix, independent = (
            correlation.get("banded", ROUNDS, bands=BANDS),
            correlation.get("identity", ROUNDS),
        )
        errors = [c.error(workload) for c in (made, prefix, independent)]
        rows.append(
            {"server": name}
            | dict(zip(("made_for_it", "for_prefix_sums", "independent"), errors, strict=True))
        )
    return rows


DIFFERENT = {
    "momentum 0.9 / none": (Workload(0.9), Workload()),
    "momentum 0.9 / 0.5": (Workload(0.9), Workload(0.5)),
    "weight decay 0.01 a round / none": (Workload(decay=0.99), Workload()),
    "no difference": (Workload(), Workload()),
}
"""What the server could do differently with two kinds of layers."""
TABLES = {"CNN, FashionMNIST": MODELS["CNN, FashionMNIST"], "ResNet-18": MODELS["ResNet-18"]}


def per_layer() -> list[Row]:
    """Error of the best C for all layers over that of a C for each layer, under the optimal split
    of either.

    With sens(C_l) E_l of each kind of layers the optimal split has the error sum_l c_l sens(C_l)
    E_l sqrt(d_l), so the cost of one C is the mean of its costs for either kind, weighted by the
    terms of this sum. "worst": the largest over all weights, whatever the model. Models: layers
    have equal bounds, and the last one ("output"), or the second half of them, is treated as named
    second.
    """
    sizes = {
        name: LayerTable.from_module(models.build(kind, in_shape=shape, classes=10)).sizes
        for name, (kind, shape) in TABLES.items()
    }
    rows = []
    for name, pair in DIFFERENT.items():
        costs = [_cost(workload) for workload in pair]
        own = [
            correlation.get("banded", ROUNDS, bands=BANDS, workload=workload).coefficients
            for workload in pair
        ]
        least = [cost(c) for cost, c in zip(costs, own, strict=True)]
        row: Row = {"layers differ by": name}
        row["worst"] = max(_shared(costs, least, own, share) for share in np.linspace(0.1, 0.9, 9))
        for model, d in sizes.items():
            for what, second in (("output", len(d) - 1), ("second half", len(d) // 2)):
                weights = np.array(
                    [np.sqrt(d[:second]).sum() * least[0], np.sqrt(d[second:]).sum() * least[1]]
                )
                row[f"{model}: {what}"] = _shared(costs, least, own, weights[0] / weights.sum())
        rows.append(row)
    return rows


Cost = Callable[[np.ndarray], float]


def _cost(workload: Workload) -> Cost:
    """Norm times root mean square error: sens(C) E up to the factor sqrt(k), which is that of every
    layer.
    """
    return lambda c: float(np.sqrt(workload.variances(c, ROUNDS).mean()) * np.linalg.norm(c))


def _shared(costs: list[Cost], least: list[float], own: list[np.ndarray], share: float) -> float:
    """Least weighted cost of one C for both kinds of layers, relative to that of separate C's."""
    weights = np.array([share, 1 - share])

    def relative(c: np.ndarray) -> float:
        return float(
            np.log(sum(w * cost(c) / o for w, cost, o in zip(weights, costs, least, strict=True)))
        )

    start = weights @ np.array(own)
    return float(np.exp(minimize(relative, start, method="L-BFGS-B", options={"maxiter": 300}).fun))


def interleaved(jobs: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Median seconds of this process's time for each job, taken in turn after one run that warms
    up.

    Wall time would also measure other processes.
    """
    times: list[list[float]] = [[] for _ in jobs]
    for turn in range(repeats + 1):
        for job, own in zip(jobs, times, strict=True):
            started = time.process_time()
            job()
            if turn > 0:
                own.append(time.process_time() - started)
    return [float(np.median(own)) for own in times]


def closed_forms(kept: Values) -> dict[str, str]:
    """The tables of the page, from what is kept."""
    apart = kept.get("without amplification", without_amplification)
    poisson = kept.get("against Poisson sampling", against_poisson)
    layers, servers = kept.get("a C for each layer", per_layer), kept.get("workloads", workloads)
    errors = {
        (row["epsilon"], row["groups"]): f"{row['mean']:.3f} / {row['max']:.3f}" for row in poisson
    }
    return {
        "without secret sampling": table(
            [
                "b",
                "mean error",
                "largest error",
                "mean error of `blt` (2 buffers)",
                "lower bound for any matrix",
            ],
            (
                [
                    str(r["min_separation"]),
                    *(f"{r[k]:.3f}" for k in ("mean", "max", "blt_mean", "floor")),
                ]
                for r in apart
            ),
        ),
        "against secret sampling": table(
            ["epsilon", *(f"b = {b}{', public' if b == BANDS else ''}" for b in GROUPS)],
            ([f"{epsilon:g}", *(errors[epsilon, b] for b in GROUPS)] for epsilon in BUDGETS),
        ),
        "each layer": table(
            list(layers[0]),
            (
                [str(name), *(f"{x:.3f}" for x in costs)]
                for name, *costs in map(dict.values, layers)
            ),
        ),
        "momentum": table(
            ["server", "C optimised for it", "C optimised for plain averaging", "independent"],
            (
                [str(name), *(f"{x:.2f}" for x in found)]
                for name, *found in map(dict.values, servers)
            ),
        ),
    }


def costs(repeats: int, rounds: int) -> list[list[Row]]:
    """Times of a round's noise and, if there are rounds, of whole rounds."""
    return [noise_cost(repeats), *([[whole_rounds(rounds)]] if rounds else [])]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"put the closed forms on {PAGE}")
    parser.add_argument("--cost", action="store_true", help="times instead of closed forms")
    parser.add_argument("--repeats", type=int, default=15, help="releases to time (default 15)")
    parser.add_argument("--rounds", type=int, default=8, help="whole rounds to time (default 8)")
    options = parser.parse_args()
    if not options.cost:
        show(PAGE, closed_forms(Values(KEPT)), options.write)
        return
    for rows in costs(options.repeats, options.rounds):
        cells = (
            [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows
        )
        print(f"{table(list(rows[0]), cells)}\n")


if __name__ == "__main__":
    main()
