"""Attacks every run of a comparison; the figures are measured once and stored with the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from fedlgm import data
from fedlgm.checks import check_known
from fedlgm.data import DataSet
from fedlgm.data.class_names import class_number
from fedlgm.errors import ConfigError
from fedlgm.files import PRIVATE
from fedlgm.wording import prefix_key
from fedlgm_lab.attacks.frechet import PublicClassifier
from fedlgm_lab.attacks.gan import GanSettings
from fedlgm_lab.attacks.inception import InceptionFeatures
from fedlgm_lab.attacks.inversion import InversionSettings
from fedlgm_lab.attacks.mia import attack_outputs
from fedlgm_lab.attacks.runs import gan, inversion
from fedlgm_lab.attacks.runs.target import Images, Target
from fedlgm_lab.studies.jobs import Job
from fedlgm_lab.studies.study_rows import Row
from simulations.config import recipe as recipes
from simulations.config.overrides import override
from simulations.progress import OnProgress
from simulations.runs import strict_json
from simulations.runs.folder import RunFolder
from simulations.runs.rows import excerpt

Attack = Literal["membership", "inversion", "gan"]
_FILE = "compared_attacks.json"  # `results_file` has the results of `fedlgm attack`
_VICTIMS = 3  # number of clients that the inversion attacks
TPR_AT = 0.01
"""False-positive rate at which the table states the membership attack's true-positive rate."""
_OF_CLASS = (
    "distance",
    "agreement",
    "nearest_class",
    "floor",
    "accuracy",
    "inception_distance",
    "inception_floor",
)


@dataclass(frozen=True)
class Attacks:
    """Attacks on every run of a comparison.

    Attributes:
        names: names of the attacks.
        labels: numbers or names of the classes that "gan" reconstructs.
        inception: features for Inception distances of the reconstructions.
    """

    names: tuple[Attack, ...]
    labels: tuple[int | str, ...]
    inception: InceptionFeatures | None

    @classmethod
    def parse(cls, text: str, inception: Path | None = None) -> Attacks:
        """Parse the attacks that a text such as "membership,inversion,gan:3:9" names.

        Args:
            text: names, separated by commas.
            inception: file of the weights for Inception distances (see
                `fedlgm_lab.attacks.inception`).

        Raises:
            ConfigError: an attack is unknown, or "gan" has no class; or as in `InceptionFeatures`.
        """
        names: list[Attack] = []
        labels: list[str] = []
        for part in (part.strip() for part in text.split(",") if part.strip()):
            name, *classes = part.split(":")
            check_known("attack", name, Attack, "--attacks")
            if (name == "gan") != bool(classes) or not all(classes):
                raise ConfigError(
                    f"--attacks: {part!r}: 'gan' takes the classes to reconstruct, as in gan:3:9; "
                    "the other attacks take none"
                )
            names.append(name)  # type: ignore[arg-type]
            labels += classes
        if not names:
            raise ConfigError(
                f"--attacks takes attacks, separated by commas: {', '.join(get_args(Attack))}"
            )
        if inception is not None and not labels:
            raise ConfigError(
                "--inception measures reconstructed classes: name them, as in --attacks gan:3:9"
            )
        return cls(
            tuple(names), tuple(labels), None if inception is None else InceptionFeatures(inception)
        )

    def with_class_numbers(self, data: DataSet) -> Attacks:
        """Return the same attacks, with class numbers instead of class names.

        Raises:
            ConfigError: as in `class_number`.
        """
        with prefix_key("--attacks"):
            return replace(self, labels=tuple(class_number(data, label) for label in self.labels))


def measure(jobs: Sequence[Job], out: Path, attacks: Attacks, *, progress: OnProgress) -> list[Row]:
    """Attack every finished run of a comparison.

    The figures compare private data with releases, so they are stored in the run's folder
    `private/`. They are not measured again under the same settings.

    Membership is inferred from the outputs of the final model, with the training set as members and
    the test set as non-members. The modified-entropy attack needs no shadow models; `fedlgm attack
    lira` is stronger. Inversion attacks the updates of some clients in the first round, each
    reduced to one image, as the mechanism releases them. The class reconstruction runs the
    federation again for each class, with the data divided so that the last client does not hold the
    class.

    Args:
        jobs: finished runs of the comparison.
        out: folder of their run folders.
        attacks: attacks to run.
        progress: called with (runs done, total, description).

    Returns:
        One row per job: its folder, its audited epsilon, the results of the attacks, and, under the
        key "gan", the figures of the reconstructed classes.
    """
    rows: list[Row] = []
    for index, job in enumerate(jobs):
        folder = RunFolder(out / job.folder)
        target, store = Target.open(str(folder.path)), _Kept(folder)

        def tell(what: str, index: int = index, job: Job = job) -> None:
            progress(index, len(jobs), f"{job.folder}: {what}")

        row: Row = {"folder": str(folder.path), "gan": {}}
        row |= excerpt(("audited_epsilon",), folder.audit_summary())
        if "membership" in attacks.names:
            tell("membership")
            row |= store.get("membership", None, partial(_membership, target, folder))
        if "inversion" in attacks.names:
            tell("inversion")
            settings = {"victims": _VICTIMS, **asdict(InversionSettings())}
            row |= store.get("inversion", settings, partial(_inversion, target))
        for label in attacks.labels:
            tell(f"class {label}")
            settings = asdict(GanSettings()) | (
                {} if attacks.inception is None else {"inception": True}
            )
            reconstructed = store.get(f"gan {label}", settings, partial(_gan, job, label, attacks))
            row["gan"][str(label)] = reconstructed
        rows.append(row)
    progress(len(jobs), len(jobs), "done")
    return rows


class _Kept:
    """The stored figures of one run, with the settings under which they were measured."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._values = folder, dict[str, Any]()
        # missing or damaged: everything is measured again
        with contextlib.suppress(OSError, ValueError):
            self._values = strict_json.loads(
                (folder.path / "private" / _FILE).read_text(encoding="utf-8")
            )

    def get(self, name: str, settings: object, measured: Callable[[], Row]) -> Row:
        """Return the figures `name` under these settings; measure them if they are missing."""
        entry = self._values.get(name)
        if not isinstance(entry, dict) or entry.get("settings") != settings:
            self._values[name] = entry = {"settings": settings, "figures": measured()}
            strict_json.write(self._folder.private_file(_FILE), self._values, PRIVATE, indent=1)
        return dict(entry["figures"])


def _membership(target: Target, folder: RunFolder) -> Row:
    assembly = target.assembly()
    images = Images.of(assembly.data.dataset)
    module = folder.checkpoints.into(assembly.model.module(), assembly.model.layers)
    if not all(torch.isfinite(part).all() for part in module.parameters()):
        return {}  # a model that overflowed gives the same answer for every example
    result = attack_outputs(module, images.train, images.test)["modified-entropy"]
    rate = min(result.rates, key=lambda rate: abs(rate.fpr - TPR_AT))
    return {
        "membership_auc": result.auc,
        "membership_auc_low": result.auc_low,
        "membership_auc_high": result.auc_high,
        "membership_tpr": rate.tpr,
    }


def _inversion(target: Target) -> Row:
    # the initial model is attacked, because later rounds reveal no more
    first_round = Target(target.recipe)
    findings = inversion.attack(first_round, count=_VICTIMS)
    label = next(
        (f.protection for f in findings if f.protection != inversion.UNPROTECTED),
        inversion.UNPROTECTED,
    )
    scores = [score["ssim"] for f in findings if f.protection == label for score in f.scores]
    return {"inversion_ssim": float(np.mean(scores)), "inversion_clients": len(scores)}


def _gan(job: Job, label: int | str, attacks: Attacks) -> Row:
    raw = job.recipe.plain_values()
    if not job.recipe.data.partition.startswith("isolation"):
        override(raw, ["data.partition=isolation"])
    raw["data"]["private_class"] = label
    target, classifier = (
        Target(recipes.Recipe.model_validate(raw)),
        _classifier(raw["data"]["name"], raw["data"].get("dir")),
    )
    finding = gan.attack(target, label=label, classifier=classifier, inception=attacks.inception)
    return {
        name: float(value)
        for name, value in excerpt(_OF_CLASS, finding.to_dict()).items()
        if value is not None
    }


@cache
def _classifier(name: str, folder: str | None) -> PublicClassifier:
    """Train the classifier of a data set once, since only its distances are comparable."""
    images = Images.of(data.load(name, folder))
    return PublicClassifier.train(*images.test, images.classes)
