"""What reports are made of: plans, partitions, ledgers and exports as plain values."""

from __future__ import annotations

from typing import TypedDict

from simulations.runs.rows import LayerRow


class NoiseRow(TypedDict, total=False):
    """Noise norms of a round whose noise is correlated with others', see `simulations.reports.rounds`.

    Attributes:
        round: number, from 1.
        single: of the round's mean update.
        so_far: of the model after it.
        same_schema, sampled: of the model after it, with independent noise; `sampled` is left out where none would do.
    """

    round: int
    single: float
    so_far: float
    same_schema: float
    sampled: float


class LayerNoiseRow(TypedDict):
    """Noise norms of a layer in the mean updates of some rounds, those of `NoiseProcess.noise_over_rounds`.

    Attributes:
        layer: its name.
        norms: one for each of these rounds; None where the layer is not released.
    """

    layer: str
    norms: list[float | None]


class NoiseProcess(TypedDict, total=False):
    """Noise over the rounds, where it is that of one mechanism."""

    noise_process: str
    correlated: bool
    noise_over_rounds: list[NoiseRow]
    noise_by_layer: list[LayerNoiseRow]
    error_of_the_model: dict[str, float]


class Beliefs(TypedDict, total=False):
    """What a plan believed of data that nobody read; empty where nothing had to be."""

    stated: str


class PlanReport(NoiseProcess, Beliefs):
    """The first round's plan of a recipe, and the cost of all rounds by both accountants.

    Attributes:
        recipe, mechanism, variant, rounds, unit, delta: what was planned.
        layers: one row per layer.
        parameters: number of coordinates.
        bound: of a contribution to all released layers, in the norm of the noise.
        noise_norm: root mean square l2 norm of the noise in the mean.
        noise_multiplier: sigma_* as calibrated.
        effective_multiplier: sigma_eff of the plan.
        sampling: who is in a release, in words.
        epsilon_pld, epsilon_rdp: of the whole run; `inf` where the accountant has no bound.
        guarantee, guarantee_status, noise_reproducible: what protects.
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
    delta: float
    epsilon_pld: float
    epsilon_rdp: float
    guarantee: str
    guarantee_status: str
    noise_reproducible: bool


class PartitionSizes(TypedDict):
    """Examples per client, and the number of clients without any."""

    min: int
    median: float
    max: int
    empty: int


class PartitionReport(TypedDict):
    """A recipe's partition.

    Attributes:
        recipe, scheme, clients, classes: what was divided, and how.
        sizes: examples per client.
        histogram: number of examples, [clients, classes].
        picture: file of the drawing.
    """

    recipe: str
    scheme: str
    clients: int
    classes: int
    sizes: PartitionSizes
    histogram: list[list[int]]
    picture: str


class EventGroup(TypedDict):
    """Charges of the same event.

    Attributes:
        first, last: first and last round.
        rounds: all of them as text, such as "1-3, 7"; cut short where there are many pieces.
        count: number of releases.
        clients: number of clients that made them; 0 under central trust, where the server releases.
        event: the event as the accountant writes it.
        released, noise, sampling: in words what was released, with what noise, and the sampling that is counted on.
        noise_multiplier: of Gaussian noise; else None.
        sampling_rate: probability with which a unit takes part; 1 where sampling is not counted on.
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
    """What one client has spent."""

    client: int
    releases: int
    epsilon: float


class LedgerReport(TypedDict):
    """Charges of a run and their totals.

    Attributes:
        run: its folder.
        ledger_head: where the ledger stands.
        anchors: number of heads kept in checkpoints and result, with which it agrees.
        guarantee: of the finished run; empty before.
        noise_reproducible: whether the seed is public.
        events: charges, grouped.
        notes: how to read them.
        epsilon, claimed_epsilon, delta, accountant: spent, and by which accountant.
        budget: epsilon that the recipe allows.
        clients: the worst-off first; empty under central trust, where the server releases.
    """

    run: str
    ledger_head: str
    anchors: int
    guarantee: str
    noise_reproducible: bool
    events: list[EventGroup]
    notes: list[str]
    epsilon: float
    claimed_epsilon: float
    delta: float
    budget: float
    accountant: str
    clients: list[ClientRow]


class Protection(TypedDict, total=False):
    """What belongs beside a run's model, as its summary has it."""

    made_by: str
    mechanism: str
    variant: str
    rounds: int
    epsilon: float
    claimed_epsilon: float
    delta: float
    guarantee: str
    guarantee_status: str
    noise_reproducible: bool
    ledger_head: str
    model_sha256: str


class Metadata(Protection, total=False):
    """The same with the recipe (TOML)."""

    recipe: str


class Exported(Protection, total=False):
    """A written model: file, format, its size, and where the metadata are if they are not inside."""

    file: str
    format: str
    bytes: int
    metadata_file: str | None
