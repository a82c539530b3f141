"""Rows of reports: plans, partitions, ledgers and exports as plain values."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict

from fedlgm.data.tables import Column
from simulations.runs.rows import LayerRow, PrivacyFigures


class PlanReport(PrivacyFigures):
    """The first round's plan of a recipe, and the cost of all rounds by every accountant.

    Attributes:
        recipe, mechanism, variant, rounds, unit: the planned run.
        layers: one row per layer.
        parameters: number of coordinates.
        bound: bound of a contribution to all released layers, in the norm of the noise.
        noise_norm: root mean square l2 norm of the noise in the mean.
        noise_multiplier: calibrated sigma_*.
        effective_multiplier: sigma_eff of the plan.
        sampling: units in a release, in words.
        epsilons: epsilon of the whole run by accountant; `inf` if the accountant has no bound.
        stated: assumptions about data that the plan has not read, if there were any.
        shares, readers_epsilon: figures of noise in shares, and the epsilon of readers of released
            models.
        noise_process, correlated: noise over the rounds, if they are one mechanism.
        noise_over_rounds: noise norms of some rounds by name (see
            `simulations.summaries.rounds.NoiseOverRounds.rows`).
        error_of_the_model: root mean squares over the rounds.
    """

    recipe: str
    mechanism: str
    variant: str
    layers: list[LayerRow]
    parameters: int
    bound: float
    noise_norm: float
    noise_multiplier: float
    effective_multiplier: float
    rounds: int
    unit: str
    sampling: str
    epsilons: dict[str, float]
    stated: NotRequired[str]
    shares: NotRequired[dict[str, float]]
    readers_epsilon: NotRequired[float]
    noise_process: NotRequired[str]
    correlated: NotRequired[bool]
    noise_over_rounds: NotRequired[list[dict[str, float]]]
    error_of_the_model: NotRequired[dict[str, float]]


class EventGroup(TypedDict):
    """Charges of the same event.

    Attributes:
        first, last: first and last round.
        rounds: all rounds as text, such as "1-3, 7"; shortened if there are many pieces.
        count: number of releases.
        clients: number of clients that made them; 0 under central trust, where the server releases.
        event: the event as the accountant writes it.
        released, noise, sampling: the released vector, its noise, and the sampling on which the
            cost relies, in words.
        noise_multiplier: multiplier of Gaussian noise; else None.
        sampling_rate: probability that a unit takes part; 1 if the cost does not rely on sampling.
        steps: noisy steps in one release.
    """

    first: int
    count: int
    event: str
    last: int
    rounds: str
    clients: int
    released: str
    noise: str
    sampling: str
    noise_multiplier: float | None
    sampling_rate: float
    steps: int


class ClientRow(TypedDict):
    """One client's spending."""

    client: int
    releases: int
    epsilon: float


class LedgerTotals(PrivacyFigures, total=False):
    """Charges of a ledger, and their totals.

    Attributes:
        ledger_head: the ledger's head.
        events: charges, grouped.
        accountant: accountant of both epsilons.
        clients: largest spending first; empty under central trust, where the server releases.
    """

    ledger_head: str
    events: list[EventGroup]
    accountant: str
    clients: list[ClientRow]


class LedgerReport(LedgerTotals):
    """Charges of a run and their totals; the guarantee is empty before the first release.

    Attributes:
        run: folder of the run.
        anchors: number of heads that checkpoints and result hold. All of them agree with the
            ledger.
        notes: explanation of the charges.
        budget: epsilon that the recipe permits.
    """

    run: str
    anchors: int
    notes: list[str]
    budget: float


class BareLedgerReport(LedgerTotals):
    """Charges of a ledger file and their totals; the guarantee is the weakest that rows state.

    Attributes:
        ledger: the file.
        protects: unit and relation that the rows state; empty if they state none.
    """

    ledger: str
    protects: str


class Protection(PrivacyFigures, total=False):
    """Protection of a run's model, from the run's summary."""

    made_by: str
    mechanism: str
    variant: str
    rounds: int
    ledger_head: str
    model_sha256: str


class Metadata(Protection, total=False):
    """The protection with the recipe (TOML) and task, and names of classes and columns if they have
    names.

    `coefficients` is "linear" for a model of one linear layer.
    """

    recipe: str
    task: str
    labels: list[str]
    columns: list[Column]
    coefficients: str


class Exported(Protection, total=False):
    """A written model, with its format and its size. The metadata have their own file if they are
    not in the model's file.
    """

    file: str
    format: str
    bytes: int
    metadata_file: str | None
