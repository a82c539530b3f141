"""What a recipe with privacy.unit = "example" may say, and what its runs sample."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from fedlgm import mechanisms, privacy
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.facts import LocalSteps, RunFacts, Sampling
from fedlgm.mechanisms import Mechanism
from fedlgm.privacy.guarantee import Unit
from strategies import ServerStep
from strategies.server_optimizer import ServerOptimizer

if TYPE_CHECKING:
    from simulations.config.recipe import Recipe


_HUGE = 1e6  # noise multiplier beyond which epsilon does not fall any more


def check_unit(recipe: Recipe, unit: Unit) -> None:
    """Refuse a mechanism that protects another unit than the recipe says.

    Args:
        recipe: the recipe.
        unit: the mechanism's.

    Raises:
        ConfigError: with the mechanisms that fit.
    """
    if unit == recipe.unit:
        return
    verb = {"client": "bounds whole clients", "example": "bounds examples"}[unit]
    known = ", ".join(name for name in mechanisms.names(recipe.unit) if mechanisms.is_private(name))
    raise ConfigError(
        f"mechanism.name: {recipe.mechanism.name} {verb}, but privacy.unit is {recipe.unit!r}: set privacy.unit = "
        f"{unit!r}, or use one of {known}"
    )


def check_example_level(recipe: Recipe) -> None:
    """Refuse settings that do not fit example-level training.

    Raises:
        ConfigError: the first of them, by its key, and what would be right.
    """
    federation, training, budget, run = recipe.federation, recipe.training, recipe.privacy, recipe.run
    own = budget.trust == "local"
    if federation.sampling not in ("poisson", "fixed"):
        raise ConfigError(
            f"federation.sampling = {federation.sampling!r} keeps rounds between a client's participations, which "
            "protects clients: with privacy.unit = 'example' use 'poisson'"
        )
    for key, value, usual, why in (
        ("training.gradient_clip", training.gradient_clip, None, "the mechanism bounds every example's gradient"),
        ("training.vectorize", training.vectorize, "off", "a client's examples are already trained together"),
        ("training.compile", training.compile, False, "the example-level engine is not compiled"),
        ("federation.stragglers", federation.stragglers, 0.0, "every client makes all steps that are accounted for"),
        ("run.audit", run.audit, False, "canaries stand for clients"),
        (
            "privacy.noise",
            budget.noise,
            "independent",
            "steps sample examples by Poisson, which correlated noise cannot use",
        ),
        ("federation.sampling", federation.sampling, "poisson", "cohorts of a fixed size protect clients alone"),
    ):
        if value != usual:
            raise ConfigError(f"{key} cannot be {value!r} with privacy.unit = 'example': {why}; leave it out")
    if own:
        _check_own_noise(recipe)
        return
    if budget.max_participations is not None:
        raise ConfigError("privacy.max_participations is for privacy.trust = 'local': leave it out here")
    if federation.sampling != "poisson" or recipe.sampling.rate < 1 or federation.dropout:
        raise ConfigError(
            "federation.rate: with privacy.unit = 'example' and trust = 'central' every client takes part in every "
            "step, and examples are sampled within it: set rate = 1, sampling = 'poisson' and no dropout"
        )
    for key in ("sampling_rate", "steps"):
        if getattr(training, key) is not None:
            raise ConfigError(
                f"training.{key} is for clients that noise their own steps (privacy.trust = 'local'): here a round is "
                "one step, and its rate is training.batch_size over the number of examples"
            )
    if training.epochs != 1:
        raise ConfigError(
            "training.epochs: a round is one step here: leave epochs out and set federation.rounds to the number of "
            "steps; an epoch is (number of examples) / training.batch_size of them"
        )
    if federation.server_optimizer in ("momentum", "adam") or federation.server_lr != 1:
        raise ConfigError(
            "federation.server_optimizer and server_lr: a round is one step here, and [training] says how it is made "
            "(optimizer, lr, momentum): leave them out"
        )


def _check_own_noise(recipe: Recipe) -> None:
    if recipe.training.sampling_rate is None:
        raise ConfigError(
            "training.sampling_rate is needed where clients noise their own steps: the public probability with which "
            "each of a client's examples is in a step's batch, the same for every client (how many examples a client "
            "has is private)"
        )


def sampled(recipe: Recipe, examples: int) -> tuple[Sampling, LocalSteps | None]:
    """What is sampled in a round of an example-level run, and the steps that clients noise themselves.

    Args:
        recipe: a recipe with unit "example".
        examples: number N of training examples of all clients together; used, and so public, under central trust only.

    Raises:
        ConfigError: a batch larger than the data.
    """
    training = recipe.training
    if recipe.privacy.trust == "local":
        assert training.sampling_rate is not None
        count = training.steps or math.ceil(training.epochs / training.sampling_rate - 1e-9)
        return recipe.sampling, LocalSteps(count, training.sampling_rate, float(training.batch_size))
    if training.batch_size > examples:
        raise ConfigError(
            f"training.batch_size = {training.batch_size} is more than the {examples} training examples there are"
        )
    return Sampling("poisson", examples, training.batch_size / examples), None


def calibrated(mechanism: Mechanism, facts: RunFacts) -> RunFacts:
    """The facts with the noise multiplier that meets their budget.

    Raises:
        PrivacyError: none does; the message says how many steps would be possible.
    """
    try:
        return facts.with_multiplier(mechanism.calibrate(facts))
    except PrivacyError as error:
        raise PrivacyError(f"{error}; {_remedy(mechanism, facts)}") from error


def _remedy(mechanism: Mechanism, facts: RunFacts) -> str:
    """The largest number of rounds, among halves of the planned ones, that the budget allows."""
    rounds = facts.releases // 2
    while rounds >= 1:
        try:
            multiplier = mechanism.calibrate(replace(facts, rounds=rounds, max_participations=None))
        except PrivacyError:
            rounds //= 2
            continue
        return f"federation.rounds = {rounds} would do, with a noise multiplier of {multiplier:.4g}"
    _, delta = facts.budget()
    rate, kind = facts.accounted_rate, facts.accountant
    least = privacy.epsilon(_HUGE, delta, steps=1, sampling_rate=rate, relation=facts.relation, accountant=kind)
    return (
        f"no number of steps would do: the least epsilon that the {kind} accountant shows at this delta is {least:.4g}"
        "; raise privacy.epsilon or privacy.delta" + (", or use privacy.accountant = 'pld'" if kind == "rdp" else "")
    )


def step_of(recipe: Recipe) -> ServerStep:
    """The step of a run whose rounds are steps, by [training]."""
    training = recipe.training
    name = training.optimizer if training.optimizer == "adam" or not training.momentum else "momentum"
    return ServerOptimizer(name, training.lr, training.momentum, eps=1e-8)
