"""What applications write down: what was spent, and what a simulation may compare with the data themselves."""

from __future__ import annotations

from typing import TypedDict


class Diagnostics(TypedDict, total=False):
    """Figures that compare with the data themselves: not released, not private.

    Attributes:
        objective, optimum, relative_error, objective_by_pass: of a descent.
        recovery_error, variance_kept, spectrum: of principal components.
    """

    objective: float
    optimum: float
    relative_error: float
    objective_by_pass: list[float]
    recovery_error: float
    variance_kept: float
    spectrum: list[float]


class Spent(TypedDict):
    """What an application has spent of its budget, and what is guaranteed."""

    budget: float
    delta: float
    epsilon: float
    claimed_epsilon: float
    guarantee: str
    guarantee_status: str
    noise_reproducible: bool


class Found(TypedDict, total=False):
    """What an application ran on and what it found.

    Attributes:
        application: "coordinate-descent" or "pca".
        data, rows, clients: what it ran on, over how many row holders.
        method: of principal components.
        rule, family: of a descent.
        coordinates, theta: of a descent: their number, and the released vector.
        dimension, spectrum: of principal components: features, and the released eigenvalues.
        diagnostics: see there.
        run: folder, where one was asked for.
    """

    application: str
    data: str
    rows: int
    clients: int
    method: str
    rule: str
    family: str
    coordinates: int
    theta: list[float]
    dimension: int
    spectrum: list[float]
    diagnostics: Diagnostics
    run: str


class ApplicationResult(Spent, Found):
    """Summary of an application, beside its settings."""
