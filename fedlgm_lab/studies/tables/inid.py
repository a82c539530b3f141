"""Tables I to III and V and Figures 5 and 6 of the paper on i.n.i.d. Gaussian and Laplace noise.

The tables take about three minutes on one core. `inid_figures` draws Figures 1 to 4.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from dp_accounting.pld import privacy_loss_distribution
from sklearn.datasets import load_digits

from fedlgm import mechanisms
from fedlgm.mechanisms import inid
from fedlgm.mechanisms.group_noise import calibrate_laplace
from fedlgm.mechanisms.profiles import as_profile
from fedlgm.noise.draws import draw
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import RunFacts, Sampling
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.accounting import calibrate
from fedlgm.privacy.gaussian import gaussian_mu
from fedlgm.training import models
from fedlgm_lab.applications.objectives import Array
from fedlgm_lab.applications.pca import covariance_plan, methods
from fedlgm_lab.studies.tables.inid_descent import descent
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.pca_trials import recovery_errors
from fedlgm_lab.studies.tables.profiles import (
    expected_error,
    gaussian_groups,
    gini,
    laplace_groups,
    unit_profile,
)
from fedlgm_lab.studies.tables.staircase import best_gamma, expected_l1
from fedlgm_lab.studies.tables.store import Values

Rows = list[dict[str, Any]]
Setting = tuple[int, float, float]  # passes, clip, rate
SHAPES = ("uniform", "linear", "quadratic", "exponential", "one-hot")
SEED = 2024


def db(ratio: float) -> float:
    return 10 * math.log10(ratio)


def gaussian_mse(profile: Array, epsilon: float) -> float:
    return expected_error("gaussian", inid.gaussian_inid(profile, epsilon, 1e-6))


def laplace_mse(profile: Array, epsilon: float) -> float:
    return expected_error("laplace", inid.laplace_inid(profile, epsilon))


def claims() -> Rows:
    """Recompute the figures in decibels that the paper states in section V."""
    mu, epsilon = gaussian_mu(0.5, 1e-6), 0.5
    gain_g = {s: db(20 / mu**2 / gaussian_mse(unit_profile(s, 20), epsilon)) for s in SHAPES}
    gain_l = {
        s: db(40 / epsilon**2 / laplace_mse(unit_profile(s, 20, norm=1), epsilon)) for s in SHAPES
    }

    def relative(shape: str, size: int) -> float:
        return db(size / mu**2 / gaussian_mse(unit_profile(shape, size), epsilon))

    crossover = next(
        k for k in range(1, 99) if laplace_mse(unit_profile("uniform", k), epsilon) > k / mu**2
    )
    always = all(
        laplace_mse(p, 0.5) < gaussian_mse(p, 0.5)
        for p in (unit_profile("exponential", k) for k in range(1, 200))
    )
    saturation = db(laplace_mse(unit_profile("exponential", 400, norm=1), epsilon))
    one_hot = db(laplace_mse(unit_profile("one-hot", 400, norm=1), epsilon))
    gaussian = db(gaussian_mse(unit_profile("exponential", 400), epsilon))
    printed_g = {"linear": 1.145, "quadratic": 2.442, "exponential": 9.658, "one-hot": 13.01}
    printed_l = {"linear": 0.546, "quadratic": 1.39, "exponential": 7.609}
    rows: list[tuple[str, Any, Any]] = [
        *((f"Gaussian gain, {s}, K=20 (dB)", paper, gain_g[s]) for s, paper in printed_g.items()),
        ("Gaussian, exponential, saturation (dB)", 21.477, gaussian),
        *(
            (f"Gaussian gain K=25 over K=20, {s} (dB)", 0.02, relative(s, 25) - gain_g[s])
            for s in ("linear", "quadratic")
        ),
        *((f"Laplace gain, {s}, K=20 (dB)", paper, gain_l[s]) for s, paper in printed_l.items()),
        ("Laplace, exponential, saturation (dB)", 14.243, saturation),
        ("... above one-hot (dB)", 5.4, saturation - one_hot),
        ("first K where uniform Laplace loses to Gaussian", 9, crossover),
        ("exponential Laplace beats Gaussian for all K < 200", "yes", "yes" if always else "no"),
    ]
    return [{"claim": name, "paper": paper, "ours": ours} for name, paper, ours in rows]


def table_two() -> Rows:
    """Compute the mean absolute errors in two dimensions for the profile (0.85, 0.15)."""
    rows = []
    paper = (3.9962, 1.9862, 1.3050, 0.9546, 0.7366, 0.5856)
    for epsilon, printed in zip((0.5, 1.0, 1.5, 2.0, 2.5, 3.0), paper, strict=True):
        gamma, profile = best_gamma(epsilon), [0.85, 0.15]
        row = {
            "epsilon": epsilon,
            "staircase (paper)": printed,
            "staircase": expected_l1(epsilon, gamma),
            "gamma": gamma,
        }
        row["i.i.d. Laplace"] = expected_error(
            "laplace", inid.noise_scales("laplace", "iid", profile, epsilon), p=1
        )
        row["i.n.i.d. Laplace"] = expected_error(
            "laplace", inid.laplace_inid(profile, epsilon, p=1), p=1
        )
        rows.append(row)
    return rows


def table_three(trials: int) -> Rows:
    """Measure the mean subspace recovery error of DP-PCA and its standard error, for M=100, N=1000,
    r=10 and delta=1e-6.
    """
    paper = {
        "gaussian-iid": (0.4762, 0.2484, 0.1067),
        "gaussian-inid": (0.3269, 0.1728, 0.0752),
        "laplace-iid": (0.6185, 0.3272, 0.1389),
        "laplace-inid": (0.5034, 0.2523, 0.1093),
    }
    budgets = (1.0, 2.0, 5.0)
    plans = {
        f"{name} {epsilon:g}": covariance_plan(
            name, 100, epsilon, 1e-6 if name.startswith("gaussian") else 0.0
        )
        for name in methods()
        for epsilon in budgets
    }
    clipped = covariance_plan("gaussian-inid", 100, 1.0, 1e-6)
    plans["clipping only"] = replace(clipped, diagonal=0.0, off_diagonal=0.0)
    errors = recovery_errors(plans, rank=10, rows=1000, trials=trials, keys=KeyRing.from_seed(SEED))
    rows: Rows = []
    for name in methods():
        row: dict[str, Any] = {"method": name, "guarantee": plans[f"{name} 1"].guarantee.status}
        for i, epsilon in enumerate(budgets):
            row[f"eps={epsilon:g} paper"] = paper[name][i] if name in paper else "-"
            row[f"eps={epsilon:g}"] = mean_and_error(errors[f"{name} {epsilon:g}"])
        rows.append(row)
    floor = mean_and_error(errors["clipping only"])
    rows.append(
        {"method": "clipping alone, no noise", "guarantee": "none"}
        | dict.fromkeys(list(rows[0])[2:], "-")
    )
    rows[-1].update({f"eps={epsilon:g}": floor for epsilon in budgets})
    return rows


def mean_and_error(x: Array) -> str:
    return f"{x.mean():.4f} ± {x.std(ddof=1) / math.sqrt(x.size):.4f}"


def laplace_mse_by_pld(profile: Array, epsilon: float, delta: float) -> float:
    """Compute the mean squared error of product Laplace noise whose privacy loss distribution
    proves (epsilon, delta)-DP.

    The coordinates are decoupled, so the worst neighbour changes every coordinate by its
    sensitivity. The ratios lambda_i/beta_i are rounded up to at most 60 levels, which is sound. The
    result is the least error of the shapes lambda^(1/3) and lambda^(1/2) and of the (epsilon, 0)-DP
    noise.
    """

    def fits(ratios: Array) -> bool:
        levels = np.geomspace(ratios.max(), max(ratios.min(), ratios.max() * 1e-3), 60)
        index = np.searchsorted(-levels, -ratios, side="right") - 1
        total = None
        for level, count in zip(*np.unique(index, return_counts=True), strict=True):
            one = privacy_loss_distribution.from_laplace_mechanism(
                1 / levels[level], value_discretization_interval=1e-4
            ).self_compose(int(count))
            total = one if total is None else total.compose(one)
        return total is not None and bool(total.get_delta_for_epsilon(epsilon) <= delta)

    found = [laplace_mse(profile, epsilon)]
    for power in (1 / 3, 1 / 2):
        shape = profile**power
        low = epsilon / float((profile / shape).sum())
        high = 3 * (low + gaussian_mu(epsilon, delta) / float(np.linalg.norm(profile / shape)))
        for _ in range(16):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if fits(profile / shape * middle) else (low, middle)
        found.append(expected_error("laplace", shape / low))
    return min(found)


def high_dimension(sizes: tuple[int, ...]) -> Rows:
    """Compute the mean squared errors in dB of the sum of N records of a decoupled query, at (eps,
    delta) = (0.5, 1e-6).
    """
    rows = []
    for power, size in itertools.product((0.0, 0.5, 1.0, 1.5, 2.0), sizes):
        profile: Array = np.arange(1, size + 1, dtype=np.float64) ** -power
        profile = profile / math.sqrt(float(profile @ profile))
        gaussian, pure = gaussian_mse(profile, 0.5), laplace_mse(profile, 0.5)
        proven = laplace_mse_by_pld(profile, 0.5, 1e-6)
        rng = KeyRing.from_seed(SEED).numpy_generator(Purpose.NOISE, size, int(10 * power))
        # replacing one record moves coordinate i by up to lambda_i
        data = rng.uniform(-0.5, 0.5, (50, size)) * profile
        scale = inid.laplace_inid(profile, 0.5)
        released = data.sum(axis=0) + draw("laplace", scale, rng, size=(200, size))
        row: dict[str, Any] = {
            "profile": f"i^-{power:g}",
            "K": size,
            "Gini": gini(as_profile(profile)),
        }
        row |= {"Gaussian i.n.i.d.": db(gaussian), "Laplace i.n.i.d., (eps, 0)": db(pure)}
        row["... measured"] = db(float(((released - data.sum(axis=0)) ** 2).sum(axis=1).mean()))
        row["Laplace, (eps, delta) by PLD"] = db(proven)
        row["least"] = (
            "Laplace, pure"
            if pure <= gaussian
            else "Laplace, PLD"
            if proven <= gaussian
            else "Gaussian"
        )
        rows.append(row)
    return rows


def gradients() -> Rows:
    """Compute the errors of one release of the gradient of softmax regression on digits (1,797
    rows, layers of 640 and 10 parameters).
    """
    x, labels = load_digits(return_X_y=True)
    slope = 0.1 - np.eye(10)[labels]
    layers, dims = (
        [(slope[:, :, None] * (x / 16)[:, None, :]).reshape(len(x), -1), slope],
        [640, 10],
    )
    size = math.sqrt(sum(float((g.sum(axis=0) ** 2).sum()) for g in layers))

    def error(order: int, epsilon: float, fraction: float) -> float:
        """Compute the relative root mean squared error, including the bias, if each layer is
        clipped at `fraction` of its median norm.
        """
        norms = [np.linalg.norm(g, ord=order, axis=1) for g in layers]
        clip = [fraction * float(np.median(n)) for n in norms]
        lost = [
            (g * np.maximum(0, 1 - c / n)[:, None]).sum(axis=0)
            for g, n, c in zip(layers, norms, clip, strict=True)
        ]
        if order == 2:
            scales = gaussian_groups(clip, dims, gaussian_mu(epsilon, 1e-6))
        else:
            scales = laplace_groups(clip, dims, epsilon)
        noise = expected_error(
            "gaussian" if order == 2 else "laplace", scales, counts=np.array(dims)
        )
        return math.sqrt(noise + sum(float(v @ v) for v in lost)) / size

    return [
        {"epsilon": epsilon}
        | {
            label: min(error(order, epsilon, fraction) for fraction in np.geomspace(0.01, 2, 25))
            for label, order in (
                ("Gaussian, l2 clip, delta=1e-6", 2),
                ("Laplace, l1 clip, delta=0", 1),
            )
        }
        for epsilon in (0.5, 1.0, 2.0, 5.0, 10.0)
    ]


def group_noise() -> Rows:
    """Compute the norm of one step's noise at the settings of the paper's Table IV (ResNet-20,
    5,000 steps, sampling rate 0.02).
    """
    layers = LayerTable.from_module(models.build("resnet20", in_shape=(3, 32, 32), classes=10))
    start = Transcript.start(torch.zeros(layers.size))
    spend: dict[str, Any] = {"steps": 5000, "sampling_rate": 0.02}
    multipliers = {
        ("gaussian", "Gaussian, l2 bound 1, (8, 1e-5)"): calibrate(8.0, 1e-5, **spend),
        ("laplace", "Laplace, l1 bound 1, (8, 1e-5) by PLD"): calibrate_laplace(8.0, 1e-5, **spend),
        ("laplace", "Laplace, l1 bound 1, (8, 0)"): calibrate_laplace(8.0, 0.0, **spend),
    }

    def norm(name: str, multiplier: float) -> float:
        facts = RunFacts(multiplier, Sampling("poisson", 50_000, 0.02))
        plan = mechanisms.get(name).plan(layers, facts, start)
        return float(np.linalg.norm(plan.noise_norms)) * plan.denominator

    return [
        {"rule": rule}
        | {label: norm(f"{law}-{rule}", m) for (law, label), m in multipliers.items()}
        for rule in ("inid", "spr", "iid")
    ]


def markdown(rows: Rows) -> str:
    def cell(value: Any) -> str:
        return (
            f"{value if abs(value) > 1e-9 else 0.0:.5g}" if isinstance(value, float) else str(value)
        )

    return table(list(rows[0]), ([cell(value) for value in row.values()] for row in rows))


TABLES: dict[str, Callable[[], Rows]] = {
    "claims": claims,
    "table-two": table_two,
    "table-three": lambda: table_three(1000),
    "descent": descent,
    "high-dimension": lambda: high_dimension((10, 100, 1000, 10_000)),
    "gradients": gradients,
    "group-noise": group_noise,
}


def measure(store: Values) -> None:
    """Compute the rows of every table."""
    for name, rows in TABLES.items():
        store.get(name, rows)


def texts(store: Values) -> Pages:
    """Make every table whose rows are stored."""
    shown = {name: markdown(store.values[name]) for name in TABLES if name in store.values}
    third = {name: text for name, text in shown.items() if name == "table-three"}
    rest = {name: text for name, text in shown.items() if name != "table-three"}
    return {"inid.md": third, "data/inid.md": rest}


MAKER = Maker("inid.json", texts, measure, Values)
