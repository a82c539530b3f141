"""Why correlated noise gains less than its errors say: what accuracy costs at a level of noise, and how noise fades.

    python -m benchmarks.noise_response [--study NAME ...] [--minutes M]   # go on with the runs
    python -m benchmarks.noise_response --write                            # tables of docs/results/correlated.md

Everything is measured on the task "FashionMNIST, MLP" of `benchmarks.noise_and_split`, uniform split.

* levels: accuracy under either sampling when a round's independent noise is a multiple of what epsilon 3 needs with
  secret sampling. Each has the search of `noise_and_split` and other seeds. Only that multiple is proven at epsilon 3.
* responses: a run is repeated with one push more in one round, as large as that round's noise. What is left of it
  afterwards, along itself, is the linear map from noise to models, which is 1 where models are sums of releases.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import simulations
from benchmarks import noise_and_split
from benchmarks.kept import CHANGE, Kept, Row, Search, change
from benchmarks.noise_and_split import CYCLE, MLP, NOISES, PAGE
from benchmarks.pages import put, spread, table
from fedlgm import correlation
from fedlgm.correlation import Correlation
from fedlgm.privacy import calibrate, gaussian_epsilon
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly

KEPT = PAGE.with_name("noise-response.json")
RECIPE, SPLIT = "fashion-mnist", "mechanism.name=uniform"
ROUNDS, SEPARATION, RATE, EPSILON, DELTA = 60, 10, 0.1, 3.0, 1e-5
POISSON, TURNS, BANDED, BLT = NOISES
SEARCH = Search((1.0, 2.0), 0.125, 8.0)
SEEDS = (1, 2, 3)
NEXT_TO_NONE = 3000.0  # epsilon


@cache
def multiplier() -> float:
    """Noise of a round over the bound that epsilon 3 needs with secret sampling: level 1."""
    return calibrate(EPSILON, DELTA, steps=ROUNDS, sampling_rate=RATE)


def of_level(level: float) -> str:
    """The key by which a public cycle gets independent noise of that level."""
    participations = ROUNDS // SEPARATION
    return f"privacy.epsilon={gaussian_epsilon(participations**0.5 / (level * multiplier()), DELTA)}"


def public_level() -> float:
    """Level of independent noise that epsilon 3 needs in the public cycle."""
    return (ROUNDS // SEPARATION) ** 0.5 * calibrate(EPSILON, DELTA, steps=1) / multiplier()


_NONE = f"privacy.epsilon={NEXT_TO_NONE}"
CELLS: dict[str, tuple[str, ...]] = {
    "secret Poisson sampling, next to no noise": (*NOISES[POISSON], SPLIT, _NONE),
    "public cycle, next to no noise": (*NOISES[TURNS], SPLIT, _NONE),
    "public cycle, independent noise of level 1": (*NOISES[TURNS], SPLIT, of_level(1.0)),
    "public cycle, independent noise of level 1.8": (*NOISES[TURNS], SPLIT, of_level(1.8)),
    "banded with 2 bands": (CYCLE, "privacy.noise=banded", "privacy.bands=2", SPLIT),
    "banded, split of the initial weights throughout": (
        *NOISES[BANDED],
        "mechanism.name=adaptive",
        "mechanism.memory=1",
    ),
}
"""What is run here; the cells at epsilon 3 of `noise_and_split` belong to it."""
PUSHED = (1, 16, 31, 46)


@dataclass(frozen=True)
class Setting:
    """Where responses are measured: a noise of `noise_and_split` at a server learning rate."""

    noise: str
    rate: float


SETTINGS = (Setting(POISSON, 1.0), Setting(POISSON, 2.0), Setting(BANDED, 1.0))
RESPONSE_SEEDS = (1, 2)


class Pushed:
    """Plain averaging on the server, with a push in one round.

    Args:
        rate: server learning rate.
        push: added to that round's mean [D].
        at: the round, from 1; 0 for none.

    Attributes:
        models: after each round so far.
    """

    def __init__(self, rate: float, push: Tensor, at: int) -> None:
        self._rate, self._push, self._at = rate, push, at
        self.models: list[Tensor] = []

    def step(self, model: Tensor, mean_update: Tensor) -> Tensor:
        """Next model [D]."""
        pushed = mean_update + self._push if len(self.models) + 1 == self._at else mean_update
        self.models.append(torch.add(model, pushed, alpha=self._rate))
        return self.models[-1].clone()


def responses(setting: Setting, seed: int) -> Row:
    """What is left of a push along itself, by the round of the push: a list over the rounds from that one on."""
    overrides = [*MLP, *NOISES[setting.noise], SPLIT, f"run.seed={seed}", f"data.partition_seed={seed}"]
    overrides += ["run.checkpoint_every=1000000", "run.trackers=[]"]
    assembly = Assembly(recipes.load(RECIPE, [*MLP, *NOISES[POISSON], SPLIT]))
    plan = assembly.method.plan(assembly.start())
    generator = torch.Generator().manual_seed(seed)
    scale = torch.repeat_interleave(torch.from_numpy(plan.sigma / plan.denominator), torch.tensor(plan.layers.sizes))
    push = (scale * torch.randn(plan.size, generator=generator, dtype=torch.float64)).float()

    def models(at: int) -> Tensor:
        server = Pushed(setting.rate, push, at)
        with tempfile.TemporaryDirectory() as folder:
            simulations.simulate(RECIPE, overrides=overrides, server_optimizer=server, run_dir=Path(folder) / "run")
        return torch.stack(server.models).double()

    base, row = models(0), {}
    for at in PUSHED:
        moved = (models(at) - base)[at - 1 :] / (setting.rate * float(push.double().square().sum().sqrt()))
        along = moved @ (push.double() / push.double().norm())
        row[str(at)] = [round(float(value), 4) for value in along]
        row[f"length {at}"] = [round(float(value), 3) for value in moved.norm(dim=1)]
    return row


def go_on(kept: Kept, studies: list[str]) -> None:
    """Run what is missing."""
    if "responses" in studies:
        for seed, setting in itertools.product(RESPONSE_SEEDS, SETTINGS):
            label = {"study": "responses", "noise": setting.noise, "rate": setting.rate, "seed": seed}
            if kept.keep(label, partial(responses, setting, seed)) is None:
                return
    if "levels" in studies:
        for cell in CELLS:
            while (rate := SEARCH.following(searched(kept, cell))) is not None:
                if measure(kept, cell, rate, SEARCH.seed) is None:
                    return
        for seed, cell in itertools.product(SEEDS, CELLS):
            chosen = SEARCH.chosen(searched(kept, cell))
            assert chosen is not None
            if measure(kept, cell, chosen, seed) is None:
                return


def measure(kept: Kept, cell: str, rate: float, seed: int) -> Row | None:
    """One run of a cell."""
    label = {"study": "levels", "cell": cell, "rate": rate, "seed": seed}
    return kept.measure(label, RECIPE, [*MLP, *CELLS[cell], f"federation.server_lr={rate}"])


def searched(kept: Kept, cell: str) -> dict[float, float]:
    """Figures of a cell's search so far, by rate."""
    return {row["rate"]: row["final"] for row in kept.find(study="levels", cell=cell, seed=SEARCH.seed)}


# --- what the runs show


def map_of(kept: Kept, setting: Setting) -> np.ndarray | None:
    """A [T, T] of a setting: model after round t per unit of noise in round r, means over seeds.

    Pushes were measured in four rounds; noise between two of them is taken to fade as the earlier one did.
    """
    rows = kept.find(study="responses", noise=setting.noise, rate=setting.rate)
    if not rows:
        return None
    fading = {at: np.mean([row[str(at)] for row in rows], axis=0) for at in PUSHED}
    found = np.zeros((ROUNDS, ROUNDS))
    for r in range(ROUNDS):
        at = max(own for own in PUSHED if own <= r + 1)
        found[r:, r] = fading[at][: ROUNDS - r]
    return found


def noises() -> dict[str, tuple[Correlation, float]]:
    """Each noise at epsilon 3: its correlation, and the standard deviation of its z over the bound."""
    one = calibrate(EPSILON, DELTA, steps=1)
    independent = correlation.get("identity", ROUNDS)
    found = {POISSON: (independent, multiplier()), TURNS: (independent, one * independent.sensitivity(SEPARATION))}
    for bands in (SEPARATION, 2):
        c = correlation.get("banded", ROUNDS, bands=bands)
        found[BANDED if bands == SEPARATION else f"banded, {bands} bands"] = c, one * c.sensitivity(SEPARATION)
    c = correlation.get("blt", ROUNDS, min_separation=SEPARATION)
    return found | {BLT: (c, one * c.sensitivity(SEPARATION))}


def error(c: Correlation, std: float, linear: np.ndarray) -> tuple[float, float]:
    """Root mean square over the models, and of the last one, of noise C^-1 z under the map from noise to models."""
    variances = np.sum((linear @ c.inverse()) ** 2, axis=1) * std**2
    return float(variances.mean() ** 0.5), float(variances[-1] ** 0.5)


def levels_table(kept: Kept) -> str:
    """Accuracy of every cell, paired with the cell of secret sampling at epsilon 3."""
    others = Kept(noise_and_split.KEPT)
    own = noise_and_split.found(others, "FashionMNIST, MLP")
    reference = own[POISSON, "uniform"]
    at_three = {noise: (noise, own[noise, "uniform"]) for noise in NOISES}
    cells: list[tuple[str, dict[int, float], float | None]] = []
    for cell in CELLS:
        rate = SEARCH.chosen(searched(kept, cell)) if searched(kept, cell) else None
        rows = kept.find(study="levels", cell=cell, rate=rate)
        cells.append((cell, {row["seed"]: row["final"] for row in rows if row["seed"] != SEARCH.seed}, rate))
    for noise, (_, figures) in at_three.items():
        rate = noise_and_split.best_rate(others, "FashionMNIST, MLP", (noise, "uniform"))
        cells.append((f"{noise}, epsilon 3", {seed: figures[seed] for seed in SEEDS if seed in figures}, rate))
    lines = [
        [cell, f"{rate:g}", spread(list(figures.values())), *change(figures, reference)]
        for cell, figures, rate in cells
        if figures and rate is not None
    ]
    return table(["run", "lr", "accuracy (%)", *CHANGE], lines) if lines else ""


def responses_table(kept: Kept) -> str:
    """What is left of a push, on average over the rounds of the push."""
    lines = []
    for setting in SETTINGS:
        rows = kept.find(study="responses", noise=setting.noise, rate=setting.rate)
        if not rows:
            continue
        line = [f"{setting.noise}, lr {setting.rate:g}"]
        for lag in (1, 2, 5, 10, 20, 40):
            values = [row[str(at)][lag] for row in rows for at in PUSHED if len(row[str(at)]) > lag]
            line.append(f"{np.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})")
        lines.append(line)
    return table(["run", *(f"{lag} rounds later" for lag in (1, 2, 5, 10, 20, 40))], lines) if lines else ""


def errors_table(kept: Kept) -> str:
    """Errors over those of secret sampling, for models that are sums of releases and for the measured maps."""
    maps = {"sum of releases": np.tril(np.ones((ROUNDS, ROUNDS)))}
    for setting in SETTINGS:
        found = map_of(kept, setting)
        if found is not None:
            maps[f"{setting.noise}, lr {setting.rate:g}"] = found
    lines = []
    for name, (c, std) in noises().items():
        if name == POISSON:
            continue
        cells = []
        for linear in maps.values():
            base = error(*noises()[POISSON], linear)
            cells.append(" / ".join(f"{a / b:.2f}" for a, b in zip(error(c, std, linear), base, strict=True)))
        lines.append([name, *cells])
    return table(["noise", *maps], lines)


TABLES = {"noise levels": levels_table, "responses": responses_table, "felt errors": errors_table}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="What accuracy costs at a level of noise, and how noise fades.")
    parser.add_argument("--kept", type=Path, default=KEPT, help="finished runs")
    parser.add_argument("--study", nargs="*", choices=["responses", "levels"], default=["responses", "levels"])
    parser.add_argument("--minutes", type=float, default=60.0, help="processor time after which no run is started")
    parser.add_argument("--write", action="store_true", help="write docs/results/correlated.md, run nothing")
    options = parser.parse_args()
    kept = Kept(options.kept, options.minutes)
    if not options.write:
        go_on(kept, options.study)
    for name, make in TABLES.items():
        text = make(kept)
        print(f"\n{name}\n\n{text}")
        if options.write and text:
            put(PAGE, name, text)


if __name__ == "__main__":
    main()
