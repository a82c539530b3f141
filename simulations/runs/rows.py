"""Rows of a round: a public row, and a private row for the run's operator."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict  # before Python 3.12, pydantic checks only this one

from fedlgm.data.tables import Column
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.guarantee import AttackFigures
from strategies import Failure, RoundRecord

Number = Annotated[int, Field(ge=1, lt=2**53)]
"""A round's number or a layer's size."""


class Spending(TypedDict, total=False):
    """A run's spent budget, proven and as the method's authors state it."""

    epsilon: float
    claimed_epsilon: float


class PrivacyFigures(Spending, total=False):
    """What follows from a run's recipe and ledger.

    Attributes:
        delta: delta of both epsilons.
        noise_reproducible: whether the seed is public, so that the noise can be drawn again.
        guarantee, guarantee_status: the sentence beside epsilon, and "proven", "conditional" or
            "none".
        attack_rates, attack: bounds on attacks on one unit, and the bound at 1 % false alarms in
            words.
    """

    delta: float
    noise_reproducible: bool
    guarantee: str
    guarantee_status: str
    attack_rates: AttackFigures
    attack: str


class ModelFigures(TypedDict, total=False):
    """A model's figures on the test set.

    Attributes:
        loss, accuracy, metrics: metrics of the current model on the test set: all metrics of the
            task, and two of them by name (`accuracy` if the task has one).
        headline: name of the metric that summarises the run.
        readers_epsilon: epsilon against readers of only the released models, under distributed
            trust; `epsilon` is against the server.
    """

    loss: float
    accuracy: float
    metrics: dict[str, float]
    headline: str
    readers_epsilon: float


class Figures(ModelFigures, Spending, total=False):
    """A model's figures on the test set, and its spent budget."""


class Release(TypedDict):
    """Equal releases of a run, as they were charged.

    Attributes:
        count: number of these releases.
        noise: law and size of the noise, in words.
        sampling: sampling on which the cost relies, in words.
    """

    count: int
    noise: str
    sampling: str


class Statement(PrivacyFigures, total=False):
    """The privacy statement of a run.

    Attributes:
        schema: version of these fields.
        unit, relation, trust, noise_added_by: what is protected, and from whom.
        groups: the same bounds for several units that are present or absent together, by number.
        sampling, rate, population, max_participations: how participants are drawn, the expected
            share of the population in a round, and the cap on one participant's rounds (None: no
            cap).
        rounds_planned, rounds_done: numbers of rounds.
        releases: what was charged, most frequent first.
        earlier_releases: releases of earlier runs on the same data that the ledger, and so epsilon,
            includes.
        accountant, accounting: name of the accountant, its method and its version.
        released: what was made public.
        searched: whether settings were searched on the same data.
        outside: figures that the budget does not cover, with the reason.
        noise_generator, floating_point: how the noise is drawn, and what the proof assumes of it.
        purpose, responsible, data_period, license: from the recipe's section [statement].
    """

    schema: int
    unit: str
    relation: str
    trust: str
    noise_added_by: str
    groups: dict[str, AttackFigures]
    sampling: str
    rate: float
    population: int
    max_participations: int | None
    rounds_planned: int
    rounds_done: int
    releases: list[Release]
    earlier_releases: int
    accountant: str
    accounting: str
    released: str
    searched: str
    outside: list[str]
    noise_generator: str
    floating_point: str
    purpose: str
    responsible: str
    data_period: str
    license: str


class RunSummary(ModelFigures, PrivacyFigures, total=False):
    """Summary of a finished run.

    Attributes:
        run: folder of the run.
        recipe, engine, mechanism, variant, rounds, unit: settings of the run.
        noise_multiplier: sigma_* of the run.
        noise_backend, device: generator of the noise, and device of the training.
        model_sha256: hash of the final model as one flat float32 vector.
        ledger_head: the ledger's head.
        statement: the privacy statement.
        base_sha256, unmoved: for a model with frozen parameters, their hash, and the parameters
            that no round changed.
        audited_epsilon, audit_method, audit_confidence, audit_passed: results of `run.audit`, only
            for the operator.
        failures, seconds_per_round, seconds: figures only for the operator, which are not kept in
            the run's folder.
        report: file of the report, if written.
    """

    run: str
    recipe: str
    engine: str
    mechanism: str
    variant: str
    rounds: int
    unit: str
    noise_multiplier: float
    noise_backend: str
    device: str
    model_sha256: str
    ledger_head: str
    statement: Statement
    base_sha256: str
    unmoved: list[str]
    audited_epsilon: float
    audit_method: str
    audit_confidence: float
    audit_passed: bool
    failures: dict[str, int]
    seconds_per_round: float
    seconds: float
    report: str


class LayerRow(TypedDict):
    """One layer of a release, with coordinates, bound s_j, noise scale, budget share, SNR and noise
    on the mean.

    A layer that is not released has no noise scale in the file.
    """

    layer: str
    size: int
    clip: float
    sigma: float | None
    share: float
    snr: float
    noise_norm: float
    released: bool


class RoundFigures(Figures, total=False):
    """Public figures that only some rounds have.

    Attributes:
        layer_noise: root mean square l2 norm of the noise that one noising party adds to each
            layer, [K]; 0 where not released.
        clip: bounds s_j, [K].
        sigma: noise scales sigma_j, [K]; None where not released. For noise correlated over rounds
            it is the scale of z.
        snr: s_j^2 / (d_j sigma_j^2), [K], for the round's own noise (see
            `ReleasePlan.round_sigma`).
        share: budget shares p_j, [K].
        released: number of released layers.
        score: scores behind the plan, [K], if the mechanism has any.
        clients: the figures that a `PublishedFedAvg` reads from its clients, each [clients, K].
        released_norm: l2 norm of each layer of the released noisy mean, [K]; 0 where not released.
        queries: decoded answers of the released mean to the auxiliary queries, by name.
        skipped: present and true if nothing was released. Evaluated rounds also have the figures of
            `Figures`.
    """

    layer_noise: list[float]
    clip: list[float]
    sigma: list[float | None]
    snr: list[float]
    share: list[float]
    released: int
    score: list[float]
    clients: dict[str, list[list[float]]]
    released_norm: list[float]
    queries: dict[str, list[float]]
    skipped: bool


class RoundRow(RoundFigures):
    """Public figures of a round: functions of the plan and of the releases.

    Attributes:
        round: number of the round, from 1.
        noise_norm: root mean square l2 norm of the noise in the released mean, by the plan.
        noise_scale: the same norm for the actual participants where everyone sees who takes part
            (local trust and published variants), and otherwise `noise_norm`; its sum over the
            rounds is the "noise scale" of `fedlgm compare`.
    """

    round: Number
    noise_norm: float
    noise_scale: float


class Source(TypedDict):
    """Source of a user's code in a run, with the name in the recipe, the file and its SHA-256."""

    name: str
    file: str
    sha256: str


class Provenance(TypedDict, total=False):
    """A run's provenance; earlier versions omitted parts of it.

    Attributes:
        clients: "simulated clients" or "real nodes".
        objects: hash of each object that was passed in Python.
        sources: sources of the objects that the recipe names as "package.module:name".
        layers: d_j by name.
        versions: versions of the installed packages.
        labels: names of the classes, or of the task's intervals, if they have names.
        columns: names, kinds and standardisation of the columns of a table's inputs, in their
            order.
        sites: names of the sites whose files hold the clients' data, if the protected unit is one
            example.
        trained_by: PyTorch or the compiled kernel, and the reason why `training.kernel = "auto"`
            became PyTorch.
        rows: hash of the examples and of their division, where a user's function or a folder of
            images gives them.
    """

    clients: str
    objects: dict[str, str]
    sources: dict[str, Source]
    layers: dict[str, Number]
    versions: dict[str, str]
    labels: list[str]
    columns: list[Column]
    sites: list[str]
    trained_by: str
    rows: str


class FailureRow(TypedDict):
    """A reply that is missing, failed or was rejected; `node` is None if the client has no node."""

    kind: str
    node: int | None
    client: int
    reason: str


class PrivateFigures(TypedDict, total=False):
    """A round's figures only for the run's operator, since they depend on who took part.

    Attributes:
        cohort: clients drawn.
        present: clients that were asked.
        discarded: contributions with NaN or Inf, which counted as zero.
        seconds: wall time without evaluation.
        failures: replies that are missing, failed or were rejected, each with kind, node, client
            and reason.
        exhausted: clients that did not take part because they have spent their own budget.
    """

    cohort: int
    present: int
    discarded: int
    seconds: float
    failures: list[FailureRow]
    exhausted: list[int]


class PrivateRow(PrivateFigures):
    """A round's private figures with its number, from 1."""

    round: Number


class CanaryRow(TypedDict):
    """A round's observations of the canaries, which `fedlgm_lab.audits.runs.canaries` packs."""

    round: Number


class FullRow(RoundRow, PrivateFigures, total=False):
    """A round for its operator: the public row with the private figures."""


OnRound = Callable[[FullRow], None]


def excerpt(names: Iterable[str], summary: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a summary that these names select."""
    return {name: summary[name] for name in names if name in summary}


def round_row(record: RoundRecord) -> RoundRow:
    """The public row of a finished round, without evaluation."""
    plan = record.plan
    row: RoundRow = {
        "round": record.round,
        "noise_norm": math.sqrt(float((plan.noise_norms**2).sum())),
        "noise_scale": noise_scale(record),
        **copy.deepcopy(_plan_figures(plan)),  # trackers may do what they like with a row
    }
    if record.notes:
        row["clients"] = {name: _compact(values) for name, values in record.notes.items()}
    if plan.size == 0:
        row["skipped"] = True
    return row


@lru_cache(maxsize=1)
def _plan_figures(plan: ReleasePlan) -> RoundFigures:
    """The figures of a round that follow from its plan; most rounds of a run have the same plan."""
    row: RoundFigures = {
        "layer_noise": _compact(plan.party_noise_norms),
        "clip": plan.clip.tolist(),
        "sigma": [sigma if math.isfinite(sigma) else None for sigma in plan.sigma.tolist()],
        "snr": _compact(plan.snr),
        "share": _compact(plan.shares),
        "released": int(plan.released.sum()),
    }
    if "score" in plan.notes:
        row["score"] = _compact(plan.notes["score"])
    return row


def released_figures(transcript: Transcript) -> RoundFigures:
    """Figures of the last release, including its noise. They are post-processing, so they cost
    nothing.
    """
    mean, plan = transcript.mean, transcript.plan
    if mean is None or plan is None or plan.size == 0:
        return {}
    norms = [float(part.double().norm()) for part in plan.layers.split(plan.expand(mean))]
    row: RoundFigures = {"released_norm": _compact(np.array(norms))}
    answers = {noisy.query.name: transcript.answer(noisy.query.name) for noisy in plan.queries}
    if answers:
        row["queries"] = {
            name: _compact(values) for name, values in answers.items() if values is not None
        }
    return row


def private_row(record: RoundRecord) -> PrivateRow:
    """The private row of a finished round."""
    return {
        "round": record.round,
        "cohort": record.cohort,
        "present": record.present,
        "discarded": record.discarded,
        "seconds": record.seconds,
        "failures": [_failure(failure) for failure in record.failures],
        "exhausted": list(record.exhausted),
    }


def noise_scale(record: RoundRecord) -> float:
    """Expected l2 norm of the noise in the released mean, over all layers and all noising
    parties.
    """
    plan = record.plan
    if "noise_norm" in record.notes:
        return math.sqrt(float(np.square(record.notes["noise_norm"]).sum())) / plan.denominator
    # no upload is a release of its own, so the number of uploads stays secret
    if not plan.facts.noised_by.alone:
        return math.sqrt(float((plan.noise_norms**2).sum()))
    parties = plan.facts.noised_by.noises_in_sum(record.present)
    return math.sqrt(parties * float(np.square(plan.party_noise_norms).sum())) / plan.denominator


def _failure(failure: Failure) -> FailureRow:
    return {
        "kind": failure.kind,
        "node": failure.node,
        "client": failure.client,
        "reason": failure.reason,
    }


def _compact(values: np.ndarray) -> Any:
    """Nested list of numbers with five significant digits."""
    if values.ndim > 1:
        return [_compact(row) for row in values]
    return [float(f"{value:.5g}") for value in values.tolist()]
