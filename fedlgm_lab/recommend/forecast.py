"""Forecasts of a run's accuracy from rehearsals, which train on public examples with the noise of the run.

In every round of a rehearsal, as many public clients as a cohort has train. The plan bounds their updates, the mean
receives noise of the run's standard deviation, and the run's server step follows. The accuracy on held-out public
examples is the forecast. No private example is read. docs/results/recommend.md compares forecasts with runs.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from fedlgm import data, mechanisms
from fedlgm.aggregation.bounded_sum import bound_update
from fedlgm.aggregation.contributions import unbounded
from fedlgm.errors import ConfigError, FedlgmError
from fedlgm.mechanisms import Mechanism
from fedlgm.mechanisms.method import Method
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.planning import allocation
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.transcript import Transcript
from fedlgm.training import ClientTask, Trainer, inputs
from fedlgm.training.devices import torch_threads
from fedlgm_lab.recommend.rows import ForecastRow
from fedlgm_lab.recommend.score import Landscape
from fedlgm_lab.recommend.setting import Setting, facts_for
from fedlgm_lab.recommend.units import bound_of
from fedlgm_lab.recommend.verdict import FLAT, LEVELLED
from fedlgm_lab.recommend.work import OPERATIONS, operations
from simulations.config.assembly import Assembly
from simulations.config.decided import decided

ERROR = 0.075
"""Largest error of the kept forecasts, as a fraction. The forecasts cover seven settings on one data set (digits). If
an eighth setting is exchangeable with them, the error of its forecasts stays within this bound with probability 7/8.
No other statement about the error is calibrated."""
REACH = (
    f"the range is the largest error, {100 * ERROR:g} points, of forecasts for seven settings on digits, each at its "
    "best learning rate; elsewhere the error is not known"
)
EPSILONS = (1.0, 2.0, 4.0, 8.0)
"""Budgets of the forecasts."""
SEED = 1
"""Seed of the kept forecasts."""
_MOST_CLIENTS = 100
_LEAST_CLIENTS = 10
"""Most and fewest clients that a rehearsed round trains; a smaller cohort is trained whole. The noise is the run's."""
_MOST_PASSES = 90_000
"""Most passes over an example in one rehearsal: a few seconds of one core for small models."""
_OF_ALL = 8  # a rehearsal makes at most this fraction of the operations of the advice


class Rehearsals:
    """Rehearsals of one setting.

    Args:
        setting: the recipe over public examples.
        seed: seed of clients, cohorts, orders and noise.

    Raises:
        ConfigError: a rehearsal cannot represent such a run; the message says why.
    """

    def __init__(self, setting: Setting, seed: int = SEED) -> None:
        self._assembly, self._share, self._seed = setting.assembly, setting.share, seed
        recipe, facts = self._assembly.recipe, setting.facts
        if recipe.protects.mechanisms != "client":
            raise ConfigError("rehearsals are for runs that protect clients or users")
        if facts.noise is not None:
            raise ConfigError("rehearsals are for independent noise, not for noise that is correlated over the rounds")
        if self._assembly.task.headline != "accuracy":
            raise ConfigError(f"no forecast of {self._assembly.task.headline} has been compared with runs")
        public = self._assembly.dataset
        count = max(2, round(len(public.train_y) / max(self._share, 1.0)))
        division = data.divide(public, count, recipe.data.partition, seed=seed, **recipe.data.options)
        self._clients = [rows.astype(np.int64) for rows in division if len(rows)]
        self._x, self._y = inputs.tensors(public.train_x), torch.from_numpy(public.train_y)
        self._trainer = _trainer(self._assembly, division)

    def _clients_of_a_round(self, facts: RunFacts) -> int:
        """The number of clients that the run has, or else the number that is affordable, if that is at least ten."""
        recipe, wanted = self._assembly.recipe, facts.sampling.expected
        each = recipe.federation.rounds * max(self._share, 1.0) * recipe.training.epochs
        passes = min(_MOST_PASSES, OPERATIONS / _OF_ALL / operations(self._assembly))
        if passes / each < min(_LEAST_CLIENTS, wanted):
            raise ConfigError(
                f"{recipe.federation.rounds} rounds of {_LEAST_CLIENTS} clients make {_LEAST_CLIENTS * each:,.0f} "
                f"passes over an example, and a rehearsal makes at most {passes:,.0f}"
            )
        return min(max(1, int(passes / each)), _MOST_CLIENTS, len(self._clients))

    def accuracy(self, mechanism: Mechanism, facts: RunFacts) -> float:
        """Accuracy of a rehearsal on held-out public examples, in [0, 1].

        Args:
            mechanism: bounds and noise of the run.
            facts: facts of the run, with its noise multiplier.

        Raises:
            ConfigError: the rehearsal takes too long, or the mechanism's rounds differ.
        """
        if mechanism.name not in (FLAT, LEVELLED, *allocation.names()):
            raise ConfigError(f"rehearsals are for rules that fix the split of the noise, not for {mechanism.name}")
        most = self._clients_of_a_round(facts)
        assembly, seed = self._assembly, self._seed
        recipe, rng, x, y = assembly.recipe, np.random.default_rng(seed), self._x, self._y
        layers = LayerTable.from_module(assembly.module())
        method = Method(mechanism, mechanism.table(layers), facts)
        trainer, step, keys = self._trainer, assembly.server_optimizer(), KeyRing.from_seed(seed)
        model = assembly.initial_model()
        expected, population = facts.sampling.expected, facts.sampling.population
        parties = math.sqrt(facts.noised_by.noises_in_sum(expected))
        generator = torch.Generator().manual_seed(seed)
        plan = method.plan(Transcript.start(model))
        sigma = torch.cat(
            [torch.full((int(size),), float(s)) for size, s in zip(plan.layers.sizes, plan.sigma, strict=True)]
        )
        with torch_threads(1):
            for t in range(recipe.federation.rounds):
                drawn = rng.binomial(population, expected / population)
                chosen = rng.choice(len(self._clients), size=min(drawn, most), replace=False)
                cohort = [self._clients[i] for i in chosen]
                tasks = [
                    ClientTask(
                        inputs.take(x, rows), y[rows], keys.torch_generator(Purpose.PROBE, t, i), recipe.training.epochs
                    )
                    for i, rows in enumerate(cohort)
                ]
                total = torch.zeros(plan.size, dtype=torch.float64)
                for block in trainer.updates(model, tasks):
                    for update in unbounded(block):
                        total += bound_update(update, plan)
                total *= drawn / max(len(cohort), 1)
                noise = sigma * torch.randn(plan.size, generator=generator) * parties
                model = step.step(model, plan.expand(((total + noise) / expected).float()))
            return Landscape(assembly, layers, len(assembly.dataset.test_y), 1).metrics(model)["accuracy"]


def _trainer(assembly: Assembly, division: data.Partition) -> Trainer:
    """The compiled kernel's trainer where it knows the model; otherwise many clients at once, where that is possible.

    They differ in the last bits, and the kernel takes a tenth of the time for small models.
    """
    training = assembly.recipe.training.model_copy(update={"vectorize": "off", "compile": False, "kernel": "auto"})
    recipe = assembly.recipe.model_copy(update={"training": training})
    found = decided(Assembly(recipe, assembly.own).with_data(assembly.dataset, division), workers=1)
    native = found.recipe.training.kernel == "native"
    return found.trainer(not native and found.trainer_kind.vectorized is not None, compiled=False)


def forecasts(setting: Setting, rule: str) -> tuple[list[ForecastRow], str]:
    """Forecasts over epsilon; or none, and the reason.

    Args:
        setting: the recipe over public examples.
        rule: the mechanism.
    """
    recipe = setting.assembly.recipe
    mechanism = mechanisms.get(rule, bound=bound_of(setting.assembly))
    rows: list[ForecastRow] = []
    try:
        rehearsals = Rehearsals(setting)
        for epsilon in EPSILONS:
            changed = recipe.model_copy(update={"privacy": recipe.privacy.model_copy(update={"epsilon": epsilon})})
            accuracy = rehearsals.accuracy(mechanism, facts_for(changed, None))
            low, high = interval(accuracy)
            rows.append({"epsilon": epsilon, "accuracy": accuracy, "low": low, "high": high})
    except FedlgmError as error:
        return [], str(error)
    return rows, ""


def interval(accuracy: float) -> tuple[float, float]:
    """The accuracies within the error of forecasts.

    Example:
        >>> [round(end, 3) for end in interval(0.95)]
        [0.875, 1.0]
    """
    return max(0.0, accuracy - ERROR), min(1.0, accuracy + ERROR)
