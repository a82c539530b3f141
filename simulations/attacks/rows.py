"""Rows that attacks write: figures of attacked runs, and of the cells of a comparison."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class Attacked(TypedDict, total=False):
    """Figures from an attacked run's summary; empty for a recipe."""

    accuracy: float
    epsilon: float
    claimed_epsilon: float
    audited_epsilon: float
    delta: float
    guarantee: str
    guarantee_status: str


class ClassFigures(TypedDict):
    """Reconstruction of one class.

    Attributes:
        distance, agreement, nearest_class, floor: see `simulations.attacks.gan.ClassFinding`.
        accuracy: accuracy of the attacked model.
        inception_distance, inception_floor: see `simulations.attacks.gan.ClassFinding`; only where they were requested.
    """

    distance: float
    agreement: float
    nearest_class: float
    floor: float
    accuracy: float
    inception_distance: NotRequired[float]
    inception_floor: NotRequired[float]


class RepeatedClass(ClassFigures):
    """Reconstruction of one class over the repetitions: means.

    Attributes:
        distance_std, agreement_std, inception_distance_std: standard deviations.
        seeds: repetitions.
    """

    distance_std: float
    agreement_std: float
    inception_distance_std: NotRequired[float]
    seeds: int


class ClassRow(TypedDict):
    """`simulations.attacks.gan.ClassFinding` without its images, and the attacked run's figures."""

    target: int
    kind: str
    active: bool
    distance: float
    floor: float
    nearest_class: float
    agreement: float
    classifier_accuracy: float
    images: int
    inception_distance: float | None
    inception_floor: float | None
    accuracy: float
    epsilon: float
    claimed_epsilon: float
    delta: float
    guarantee: str
    guarantee_status: str


class InversionRow(TypedDict):
    """One inversion: protection, client, layer (None: all), number of images, and success."""

    protection: str
    client: int
    layer: str | None
    method: str
    ssim: float
    psnr: float
    labels_found: int
    images: int


class MembershipFigures(TypedDict, total=False):
    """Membership from the final model's outputs; nothing for a model that overflowed."""

    membership_auc: float
    membership_auc_low: float
    membership_auc_high: float
    membership_tpr: float


class InversionFigures(TypedDict, total=False):
    """Images recovered from single updates: mean SSIM and its number of clients."""

    inversion_ssim: float
    inversion_clients: int


class AttackedRun(Attacked, MembershipFigures, InversionFigures, total=False):
    """One attacked run of a comparison.

    Attributes:
        method, epsilon_budget, partition, repetition: which run, see `simulations.studies.rows`.
        gan: figures by class, if classes were reconstructed.
    """

    method: str
    epsilon_budget: float | None
    partition: str
    repetition: int
    gan: dict[str, ClassFigures]


class AttackedCell(TypedDict, total=False):
    """All repetitions of a method at a budget and partition.

    Attributes:
        method, epsilon_budget, partition, seeds: which cell, and its number of repetitions.
        accuracy, membership_auc, membership_tpr, inversion_ssim: means, each with a standard deviation, where known.
        epsilon, claimed_epsilon, audited_epsilon: the largest; None if no run was audited. delta, guarantee,
        guarantee_status: those of the first run.
        gan: means and spread by class.
    """

    method: str
    epsilon_budget: float | None
    partition: str
    seeds: int
    accuracy: float
    accuracy_std: float
    membership_auc: float
    membership_auc_std: float
    membership_tpr: float
    membership_tpr_std: float
    inversion_ssim: float
    inversion_ssim_std: float
    epsilon: float
    claimed_epsilon: float
    audited_epsilon: float | None
    delta: float
    guarantee: str
    guarantee_status: str
    gan: dict[str, RepeatedClass]
