"""Recipes whose runs keep their releases, so that a certificate of the run can be issued."""

from __future__ import annotations

from fedlgm import mechanisms
from fedlgm.errors import ConfigError
from simulations.config.unit import Settings
from strategies import server_optimizer

STEPS = ("sgd", "momentum")
"""Server optimizers whose step is plain vector arithmetic, which a verifier repeats bit for bit."""


def server_step_of(recipe: Settings) -> tuple[str, float, float]:
    """Name, learning rate and momentum of the server's step.

    Example:
        >>> from simulations.config.recipe import load
        >>> server_step_of(load("digits"))
        ('momentum', 0.2, 0.9)
    """
    federation, training = recipe.federation, recipe.training
    named = federation.server_optimizer
    if recipe.protects.counts_examples(recipe) and not server_optimizer.is_own(named):
        plain = "momentum" if training.momentum else "sgd"
        return (
            plain if training.optimizer == "sgd" else training.optimizer,
            training.lr,
            training.momentum,
        )
    return named, federation.server_lr, federation.server_momentum


def check(recipe: Settings) -> None:
    """Refuse `run.keep_releases` where the run could not be certified.

    Raises:
        ConfigError: the message gives the reason and the remedy.

    Example:
        >>> from simulations.config.recipe import load
        >>> load("digits", ["run.keep_releases=true", "federation.server_optimizer='adam'"])
        Traceback (most recent call last):
            ...
        fedlgm.errors.ConfigError: run.keep_releases: a verifier repeats only server steps ...
    """
    run = recipe.run
    if not run.keep_releases:
        if run.beacon is not None:
            raise ConfigError("run.beacon is for runs with run.keep_releases = true")
        return
    for refused, reason in _reasons(recipe):
        if refused:
            raise ConfigError(f"run.keep_releases: {reason}")


def _reasons(recipe: Settings) -> list[tuple[bool, str]]:
    run, mechanism, step = recipe.run, recipe.mechanism.name, server_step_of(recipe)[0]
    return [
        (
            mechanisms.is_own(mechanism),
            (
                "nobody can see from the plans of your own mechanism whether it read private data: use "
                "one of the library's mechanisms"
            ),
        ),
        (
            step not in STEPS or recipe.federation.server_schedule is not None,
            (
                f"a verifier repeats only server steps of plain vector arithmetic ({', '.join(STEPS)}, "
                f"without a schedule), because the rounding of other steps, such as {step!r}, "
                "differs between processors: set federation.server_optimizer"
            ),
        ),
        (
            recipe.protects.counts_examples(recipe) and recipe.training.weight_decay is not None,
            "a verifier repeats only steps without training.weight_decay: leave it out",
        ),
        (run.audit, "canaries change the sums: set run.audit = false"),
        (
            run.patience is not None,
            (
                "a run that may stop early states the cost of all planned rounds, which the released "
                "rounds alone do not have: leave run.patience out"
            ),
        ),
        (
            recipe.privacy.trust == "distributed" and recipe.sampling.rate < 1,
            (
                "a certificate names who took part in a round, but the smaller epsilon of readers "
                "holds only if they do not know this: set federation.rate = 1"
            ),
        ),
        (
            run.beacon is not None and recipe.noised_by.uploads_released,
            (
                f"under {recipe.privacy.trust} trust the clients draw the noise, so the server "
                "has no noise to commit to: leave run.beacon out"
            ),
        ),
        (
            run.beacon is not None and run.seed is not None,
            (
                "a public seed needs no beacon, because anyone can draw its noise: leave run.seed or "
                "run.beacon out"
            ),
        ),
    ]
