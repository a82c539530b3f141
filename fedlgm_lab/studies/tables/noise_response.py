"""Measurements that show why correlated noise gains less than its errors predict: the accuracy at
given noise levels, and how fast the effect of noise fades.

Everything is measured on the task "FashionMNIST, MLP" of `noise_and_split` with the uniform split.

* levels: the accuracy under both types of sampling, with independent noise of several multiples of
level 1.
  Level 1 is the noise that epsilon 3 needs with secret sampling. Each level is searched as in
  `noise_and_split` and then run on other seeds. Only level 1 with secret sampling is proven at
  epsilon 3.
* responses: a run is repeated with an additional vector, the push, in one round; it is as large as
the round's noise. The share of the push that remains in later weights and outputs is 1 if models
are sums of releases, and less if training undoes the push.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from fedlgm.mechanisms import Mechanism
from fedlgm.noise import correlation
from fedlgm.noise.correlation import Correlation
from fedlgm.planning import allocation, clipping
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy import calibrate
from fedlgm.privacy.guarantee import Guarantee
from fedlgm_lab.studies.tables import noise_and_split
from fedlgm_lab.studies.tables.maker import Maker
from fedlgm_lab.studies.tables.noise_and_split import NOISES
from fedlgm_lab.studies.tables.pages import spread, table
from fedlgm_lab.studies.tables.runs import cells, measure_cells
from fedlgm_lab.studies.tables.store import CHANGE, Kept, Row, change, simulated
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly

NAME, TASK, SPLIT = "noise-response", "FashionMNIST, MLP", "uniform"
ROUNDS, SEPARATION, RATE, EPSILON, DELTA = 60, 10, 0.1, 3.0, 1e-5
POISSON, TURNS, BANDED, BLT = map(str, NOISES)


@dataclass(frozen=True)
class PowerSplit(Mechanism):
    """EqClip bounds, and budget shares in proportion to a power of the layers' sizes. The power 0
    gives the uniform rule, and the power 1/2 the SNR-consistent rule.
    """

    bound: float = 1.0
    power: float = 0.25

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """The same plan in every round."""
        clip, share = clipping.eq_clip(self.bound, len(layers)), layers.sizes**self.power
        sigma = allocation.spread(share / share.sum(), clip, facts.noise_multiplier)
        return ReleasePlan(layers, clip, sigma, facts, Guarantee("proven", "bounded, then noised"))


@cache
def multiplier() -> float:
    """Compute level 1: the ratio of a round's noise to the bound that epsilon 3 needs with secret
    sampling.
    """
    return calibrate(EPSILON, DELTA, steps=ROUNDS, sampling_rate=RATE)


PUSHED, IMAGES = (1, 16, 31, 46), 2000


@dataclass(frozen=True)
class Setting:
    """A setting in which responses are measured: a noise of `noise_and_split` and a server learning
    rate.
    """

    noise: str
    rate: float


SETTINGS = (Setting(POISSON, 1.0), Setting(BANDED, 1.0))
RESPONSE_SEEDS = (1,)


class Pushed:
    """A server optimizer that averages, and adds a push in one round.

    Args:
        rate: server learning rate.
        push: vector [D] that is added to the mean update of round `at`.
        at: round of the push, from 1; 0 for no push.

    Attributes:
        models: the models after each round so far.
    """

    def __init__(self, rate: float, push: Tensor, at: int) -> None:
        self._rate, self._push, self._at = rate, push, at
        self.models: list[Tensor] = []

    def step(self, model: Tensor, mean_update: Tensor) -> Tensor:
        """Return the next model [D]."""
        pushed = mean_update + self._push if len(self.models) + 1 == self._at else mean_update
        self.models.append(torch.add(model, pushed, alpha=self._rate))
        return self.models[-1].clone()


def responses(setting: Setting, store: Kept, seed: int) -> Row:
    """Measure the remaining share of a push in each round from the push on, for every round of a
    push.

    "weights N" is the share for a push in round N that remains in the weights: their change along
    the push. "outputs N" is the share that remains in the outputs for test images: their change
    along the change that the complete push would cause in the same round.
    """
    by_noise = {
        cell.name["noise"]: cell
        for cell in cells(store, noise_and_split.NAME, task=TASK, split=SPLIT)
    }
    secret, chosen = by_noise[POISSON], by_noise[setting.noise]
    changes = chosen.changes | {"run.seed": seed, "data.partition_seed": seed}
    changes |= {"run.checkpoint_every": 1000000, "run.trackers": []}
    assembly = Assembly(recipes.load(secret.recipe, secret.changes))
    plan, layers = assembly.privacy.first_plan(), assembly.model.layers
    generator = torch.Generator().manual_seed(seed)
    scale = torch.repeat_interleave(
        torch.from_numpy(plan.sigma / plan.denominator), torch.tensor(layers.sizes)
    )
    push = (scale * torch.randn(plan.size, generator=generator, dtype=torch.float64)).float()
    module = assembly.model.module()
    images = torch.from_numpy(np.asarray(assembly.data.dataset.test_x)[:IMAGES])

    def models(at: int) -> Tensor:
        server = Pushed(setting.rate, push, at)
        with simulated(chosen.recipe, overrides=changes, server_optimizer=server):
            return torch.stack(server.models)

    @torch.no_grad()
    def outputs(model: Tensor) -> Tensor:
        layers.load_(module, model)
        logits = module(images).double()
        # softmax depends only on the centred logits
        centred: Tensor = logits - logits.mean(1, keepdim=True)
        return centred

    base, row, whole = models(0), {}, setting.rate * push
    bare, full = [outputs(model) for model in base], [outputs(model + whole) for model in base]
    for at in PUSHED:
        pushed = models(at)[at - 1 :]
        moved = (pushed - base[at - 1 :]).double()
        row[f"weights {at}"] = [_along(change, whole.double()) for change in moved]
        row[f"outputs {at}"] = [
            _along(outputs(model) - bare[t], full[t] - bare[t])
            for t, model in enumerate(pushed, start=at - 1)
        ]
    return row


def _along(change: Tensor, whole: Tensor) -> float:
    return round(float((change * whole).sum() / whole.square().sum()), 4)


def measure_all(store: Kept) -> None:
    """Make the missing runs."""
    for seed, setting in itertools.product(RESPONSE_SEEDS, SETTINGS):
        label = {"study": "responses", "noise": setting.noise, "rate": setting.rate, "seed": seed}
        store.keep(label, partial(responses, setting, store, seed))
    measure_cells(cells(store, NAME))


# --- what the runs show


def fading(store: Kept, setting: Setting, what: str) -> dict[int, list[np.ndarray]]:
    """Collect the remaining shares of each push, by its round. Each entry has an array for each
    seed, with the rounds from the push on.
    """
    rows = store.find(study="responses", noise=setting.noise, rate=setting.rate)
    return {at: [np.array(row[f"{what} {at}"]) for row in rows] for at in PUSHED} if rows else {}


def map_of(store: Kept, setting: Setting, what: str) -> np.ndarray | None:
    """Compute a setting's matrix A [T, T]: the share of round r's noise that remains after round t,
    averaged over the seeds.

    Pushes were measured in four rounds. The noise of a round between two of them is assumed to fade
    like the earlier push.
    """
    left = fading(store, setting, what)
    if not left:
        return None
    found = np.zeros((ROUNDS, ROUNDS))
    for r in range(ROUNDS):
        at = max(own for own in PUSHED if own <= r + 1)
        found[r:, r] = np.mean(left[at], axis=0)[: ROUNDS - r]
    return found


def noises() -> dict[str, tuple[Correlation, float]]:
    """Return each noise at epsilon 3, as its correlation and the ratio of the standard deviation of
    z to the bound.
    """
    one = calibrate(EPSILON, DELTA, steps=1)
    independent = correlation.get("identity", ROUNDS)
    found = {
        POISSON: (independent, multiplier()),
        TURNS: (independent, one * independent.sensitivity(SEPARATION)),
    }
    c = correlation.get("banded", ROUNDS, bands=SEPARATION)
    found[BANDED] = c, one * c.sensitivity(SEPARATION)
    c = correlation.get("blt", ROUNDS, min_separation=SEPARATION)
    return found | {BLT: (c, one * c.sensitivity(SEPARATION))}


def error(c: Correlation, std: float, linear: np.ndarray) -> tuple[float, float]:
    """Compute the root mean square of the noise C^-1 z in all models and in the last model, where
    the matrix `linear` maps the rounds' noise to the models.
    """
    variances = np.sum((linear @ c.inverse()) ** 2, axis=1) * std**2
    return float(variances.mean() ** 0.5), float(variances[-1] ** 0.5)


def levels_table(store: Kept) -> str:
    """Make the table of the accuracy of every cell, compared with secret sampling at epsilon 3."""
    others = noise_and_split.MAKER.open(store.folder)
    assert isinstance(others, Kept)
    runs = [cell for cell in noise_and_split.runs_of(others, TASK) if cell.name["split"] == SPLIT]
    if not runs:
        return ""
    levels = [(str(run.name["cell"]), run) for run in cells(store, NAME)]
    lines = []
    for label, run in [*levels, *((f"{run.name['noise']}, epsilon 3", run) for run in runs)]:
        figures, rate = run.figures(), run.rate()
        figures = figures[figures.index.isin(cells(store, NAME)[0].seeds)]
        if len(figures):
            reference = runs[0].figures()[figures.index]
            against = [""] * 3 if run == runs[0] else change(figures, reference)
            lines.append([label, f"{rate:g}", spread(figures), *against])
    return table(["run", "lr", "accuracy (%)", *CHANGE], lines)


LAGS = (1, 2, 5, 10, 20, 40)


def responses_table(store: Kept) -> str:
    """Make the table of the remaining shares of a push: mean and range over pushes and seeds."""
    lines = []
    for setting, what in itertools.product(SETTINGS, ("weights", "outputs")):
        left = [own for seeds in fading(store, setting, what).values() for own in seeds]
        if not left:
            continue
        line = [f"{setting.noise}, lr {setting.rate:g}: {what}"]
        for lag in LAGS:
            values = [own[lag] for own in left if len(own) > lag]
            line.append(f"{np.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})")
        lines.append(line)
    return table(["run", *(f"{lag} rounds later" for lag in LAGS)], lines) if lines else ""


def errors_table(store: Kept) -> str:
    """Make the table of the ratios of errors to the errors of secret sampling, for sums of releases
    and for the measured fading.
    """
    maps = {"sum of releases": np.tril(np.ones((ROUNDS, ROUNDS)))}
    for setting in SETTINGS:
        found = map_of(store, setting, "outputs")
        if found is not None:
            maps[f"fading as in: {setting.noise}, lr {setting.rate:g}"] = found
    lines = []
    for name, (c, std) in noises().items():
        if name == POISSON:
            continue
        cells = []
        for linear in maps.values():
            base = error(*noises()[POISSON], linear)
            cells.append(
                " / ".join(f"{a / b:.2f}" for a, b in zip(error(c, std, linear), base, strict=True))
            )
        lines.append([name, *cells])
    return table(["noise", *maps], lines)


TABLES = {"noise levels": levels_table, "responses": responses_table, "felt errors": errors_table}


MAKER = Maker(
    "noise-response.json",
    lambda store: {"data/correlated.md": {name: of(store) for name, of in TABLES.items()}},
    measure_all,
    partial=True,
)
