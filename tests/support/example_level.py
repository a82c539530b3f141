"""Small recipes of example-level privacy."""

from __future__ import annotations

from simulations.config import recipe as recipes

STEPS = 12
CENTRAL = (
    f"federation.rounds={STEPS}",
    "run.evaluate_every=6",
    "run.checkpoint_every=5",
    "privacy.accountant=rdp",
)
FEDERATED = (
    "federation.clients=6",
    "federation.rounds=4",
    "federation.rate=0.9",
    "training.steps=3",
    "run.block_size=2",
    "privacy.epsilon=4",
    "privacy.accountant=rdp",
)


def central(*overrides: str):
    return recipes.load("dp-sgd-digits", [*CENTRAL, *overrides])


def federated(*overrides: str):
    return recipes.load("example-level-federation", [*FEDERATED, *overrides])
