"""Rows that applications write: the spent budget, and figures that a simulation may compare with the data."""

from __future__ import annotations

from typing import TypedDict


class Diagnostics(TypedDict, total=False):
    """Figures that compare with the data themselves: not released, not private.

    Attributes:
        objective, optimum, relative_error, objective_by_pass: figures of a descent.
        recovery_error, variance_kept, spectrum: figures of principal components.
    """

    objective: float
    optimum: float
    relative_error: float
    objective_by_pass: list[float]
    recovery_error: float
    variance_kept: float
    spectrum: list[float]


class Spent(TypedDict):
    """An application's spent budget and guarantee."""

    budget: float
    delta: float
    epsilon: float
    claimed_epsilon: float
    guarantee: str
    guarantee_status: str
    noise_reproducible: bool


class Found(TypedDict, total=False):
    """Inputs and findings of an application.

    Attributes:
        application: "coordinate-descent" or "pca".
        data, rows, clients: data set, and its numbers of rows and of clients.
        method: method of principal components.
        rule, family: rule and noise of a descent.
        coordinates, theta: a descent's number of coordinates and released vector.
        dimension, spectrum: principal components' number of features and released eigenvalues.
        diagnostics: see `Diagnostics`.
        run: the run's folder, if requested.
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
