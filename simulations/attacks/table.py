"""The privacy-utility-attack table: leakage of mechanisms at equal proven epsilon.

Every finished run of a comparison is attacked; the table shows its accuracy, its claimed, proven and audited epsilon
and the attacks' success side by side, and the LaDP-FL paper's Table X: the distance of reconstructed classes, by
budget, method and class.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

import numpy as np
import torch
from rich.console import Group

from fedlgm.attacks.frechet import PublicClassifier
from fedlgm.attacks.gan import GanSettings
from fedlgm.attacks.inception import InceptionFeatures
from fedlgm.attacks.inversion import InversionSettings
from fedlgm.attacks.mia import attack_outputs
from fedlgm.errors import ConfigError
from simulations.attacks import gan, inversion
from simulations.attacks.rows import (
    AttackedCell,
    AttackedRun,
    ClassFigures,
    InversionFigures,
    MembershipFigures,
    RepeatedClass,
)
from simulations.attacks.target import Images, Target, module_of
from simulations.config import recipe as recipes
from simulations.reports.terminal import number
from simulations.runs import strict_json
from simulations.runs.folder import RunFolder
from simulations.studies.jobs import Job
from simulations.studies.rows import by_cell
from simulations.tables import table

Attack = Literal["membership", "inversion", "gan"]
OnProgress = Callable[[int, int, str], None]
_FILE = "attacks.json"
_MEASURES = ("accuracy", "membership_auc", "membership_tpr", "inversion_ssim")
TPR_AT = 0.01
"""False-positive rate at which the table states the membership attack's true-positive rate."""


@dataclass(frozen=True)
class Attacks:
    """Attacks on every run of a comparison.

    Attributes:
        names: names of the attacks.
        labels: classes that "gan" reconstructs.
        victims: clients of the inversion.
        inversion: effort of the inversion.
        gan: training of the reconstruction.
        inception: measures Inception distances of the reconstructions too.
    """

    names: tuple[Attack, ...] = ("membership", "inversion")
    labels: tuple[int, ...] = ()
    victims: int = 3
    inversion: InversionSettings = InversionSettings()  # noqa: RUF009  (frozen)
    gan: GanSettings = GanSettings()  # noqa: RUF009  (frozen)
    inception: InceptionFeatures | None = None

    def __post_init__(self) -> None:
        if self.inception is not None and not self.labels:
            raise ConfigError("--inception measures reconstructed classes: name them, as in --attacks gan:3:9")
        if ("gan" in self.names) != bool(self.labels):
            raise ConfigError("--attacks: 'gan' takes the classes to reconstruct, as in gan:3:9")

    @classmethod
    def parse(cls, text: str, inception: Path | None = None) -> Attacks:
        """The attacks of "membership,inversion,gan:3:9".

        Args:
            text: names, separated by commas.
            inception: file of the weights for Inception distances, see `fedlgm.attacks.inception`.

        Raises:
            ConfigError: an unknown attack, a class that is not a number, or "gan" without a class; or see
                `InceptionFeatures`.
        """
        names: list[Attack] = []
        labels: list[int] = []
        for part in (part.strip() for part in text.split(",") if part.strip()):
            name, *classes = part.split(":")
            if name not in get_args(Attack):
                raise ConfigError(f"--attacks: unknown attack {name!r}; known: {', '.join(get_args(Attack))}")
            if (name == "gan") != bool(classes) or not all(label.isdigit() for label in classes):
                raise ConfigError(
                    f"--attacks: {part!r}: 'gan' takes the classes to reconstruct, as in gan:3:9, others none"
                )
            names.append(name)  # type: ignore[arg-type]
            labels += [int(label) for label in classes]
        if not names:
            raise ConfigError(f"--attacks takes attacks by comma: {', '.join(get_args(Attack))}")
        features = None if inception is None else InceptionFeatures(inception)
        return cls(tuple(names), tuple(labels), inception=features)


def measure(
    jobs: Sequence[Job], out: Path, attacks: Attacks | None = None, *, progress: OnProgress | None = None
) -> list[AttackedRun]:
    """Attack every finished run of a comparison.

    Figures compare private data with releases, so they are kept with the run's private files; they are not measured
    again under the same settings.

    Membership is inferred from the outputs of the final model, training set against test set (the modified-entropy
    attack, which needs no shadow models; `fedlgm attack lira` is stronger). Inversion attacks the updates of some
    clients in the first round, each cut to one image, as the mechanism releases them. The class reconstruction runs the
    federation again for each class, with that class isolated from the last client.

    Args:
        jobs: the comparison's runs, finished.
        out: folder of their run folders.
        attacks: attacks to run, with settings.
        progress: called with (runs done, total, description).

    Returns:
        One row per job.
    """
    attacks = attacks or Attacks()
    rows: list[AttackedRun] = []
    for index, job in enumerate(jobs):
        target = Target.open(str(out / job.folder))
        kept = _Kept(target.folder)

        def tell(what: str, index: int = index, job: Job = job) -> None:
            if progress is not None:
                progress(index, len(jobs), f"{job.folder}: {what}")

        row: AttackedRun = {
            "method": job.method,
            "epsilon_budget": job.epsilon,
            "partition": job.partition,
            "repetition": job.repetition,
        }
        row.update(cast(AttackedRun, target.figures()))
        if "membership" in attacks.names:
            tell("membership")
            row.update(cast(AttackedRun, kept.get("membership", None, partial(_membership, target))))
        if "inversion" in attacks.names:
            tell("inversion")
            settings = {"victims": attacks.victims, **asdict(attacks.inversion)}
            found = kept.get("inversion", settings, partial(_inversion, target, attacks.victims, attacks.inversion))
            row.update(cast(AttackedRun, found))
        for label in attacks.labels:
            tell(f"class {label}")
            settings = asdict(attacks.gan) | ({} if attacks.inception is None else {"inception": True})
            reconstructed = kept.get(f"gan {label}", settings, partial(_gan, job, label, attacks))
            row.setdefault("gan", {})[str(label)] = reconstructed
        rows.append(row)
    if progress is not None:
        progress(len(jobs), len(jobs), "done")
    return rows


_FiguresT = TypeVar("_FiguresT", MembershipFigures, InversionFigures, ClassFigures)


class _Kept:
    """Figures of one run that have been measured already, with the settings they were measured under."""

    def __init__(self, folder: RunFolder | None) -> None:
        if folder is None:
            raise ConfigError("figures are kept with a finished run")
        self._folder, self._values = folder, dict[str, Any]()
        with contextlib.suppress(OSError, ValueError):  # missing or damaged: everything is measured again
            self._values = strict_json.loads((folder.path / "private" / _FILE).read_text(encoding="utf-8"))

    def get(self, name: str, settings: object, measured: Callable[[], _FiguresT]) -> _FiguresT:
        """The figures `name` under these settings, measured now if missing."""
        known = self._values.get(name)
        if not isinstance(known, dict) or known.get("settings") != settings:
            self._values[name] = known = {"settings": settings, "figures": measured()}
            content = strict_json.dumps(self._values, indent=1) + "\n"
            self._folder.private_file(_FILE).write_text(content, encoding="utf-8")
        return cast(_FiguresT, dict(known["figures"]))


def cells(rows: Sequence[AttackedRun]) -> list[AttackedCell]:
    """One cell per (method, budget, partition): mean and standard deviation over the seeds of every measure.

    Epsilons are the largest over the seeds, as everywhere else.
    """
    return [_cell(runs) for runs in by_cell(rows)]


def _cell(runs: list[AttackedRun]) -> AttackedCell:
    first = runs[0]
    cell: AttackedCell = {
        "method": first["method"],
        "epsilon_budget": first["epsilon_budget"],
        "partition": first["partition"],
        "seeds": len(runs),
    }
    for name in _MEASURES:
        values = _values(runs, name)
        if values:
            cell.update(cast(AttackedCell, {name: _mean(values), f"{name}_std": _spread(values)}))
    labels = dict.fromkeys(label for run in runs for label in run.get("gan", {}))
    cell.update(
        {
            "epsilon": max(run["epsilon"] for run in runs),
            "claimed_epsilon": max(run["claimed_epsilon"] for run in runs),
            "audited_epsilon": max(_values(runs, "audited_epsilon"), default=None),
            "delta": first["delta"],
            "guarantee": first["guarantee"],
            "guarantee_status": first["guarantee_status"],
            "gan": {
                label: _repeated([run["gan"][label] for run in runs if label in run.get("gan", {})]) for label in labels
            },
        }
    )
    return cell


def _values(runs: list[AttackedRun], name: str) -> list[float]:
    """A figure's values over the runs that have it."""
    found = (cast(Mapping[str, float | None], run).get(name) for run in runs)
    return [value for value in found if value is not None]


def _repeated(found: list[ClassFigures]) -> RepeatedClass:
    made: RepeatedClass = {
        "distance": _mean([one["distance"] for one in found]),
        "distance_std": _spread([one["distance"] for one in found]),
        "agreement": _mean([one["agreement"] for one in found]),
        "agreement_std": _spread([one["agreement"] for one in found]),
        "nearest_class": _mean([one["nearest_class"] for one in found]),
        "floor": _mean([one["floor"] for one in found]),
        "accuracy": _mean([one["accuracy"] for one in found]),
        "seeds": len(found),
    }
    if all("inception_distance" in one for one in found):
        distances = [one["inception_distance"] for one in found]
        floor = _mean([one["inception_floor"] for one in found])
        made |= {
            "inception_distance": _mean(distances),
            "inception_distance_std": _spread(distances),
            "inception_floor": floor,
        }
    return made


def tables(made: Sequence[AttackedCell]) -> Group:
    """The privacy-utility-attack table, the reconstruction table if there is one, and an explanation of the figures."""
    header, body = main_table(made)
    parts: list[Any] = [table("Privacy, utility, attacks", header, body, left=_WORDS)]
    if any(cell["gan"] for cell in made):
        parts.append(table("Reconstruction of classes that one client lacks", *reconstruction_table(made), left=_WORDS))
    if any("inception_distance" in found for cell in made for found in cell["gan"].values()):
        parts.append(table("Their Frechet Inception distance", *reconstruction_table(made, _inception), left=_WORDS))
    sentences = dict.fromkeys(f"{cell['method']}: {cell['guarantee']}" for cell in made)
    return Group(*parts, *sentences, NOTES)


NOTES = (
    f"AUC and TPR (at FPR {TPR_AT:g}): membership from the final model's outputs, training set against test set; SSIM: "
    "images recovered from single updates of the first round, 1 for the private image itself; distance: Frechet "
    "distance of reconstructions and private images in the features of a classifier trained on the public test set, "
    "comparable within one data set only. A low figure does not prove privacy: a model that learned nothing has low "
    "figures too, so read them beside its accuracy."
)

_MARKS = {"conditional": " *"}
_WORDS = ("method", "budget")


def main_table(made: Sequence[AttackedCell]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: accuracy, claimed, proven and audited epsilon, success of the attacks."""
    header = ["method", "budget", "accuracy", "claimed", "proven", "audited", "AUC", "TPR", "SSIM"]
    body = []
    for cell in made:
        proven = number(cell["epsilon"]) + _MARKS.get(cell["guarantee_status"], "")
        if math.isinf(cell["epsilon"]):
            proven = "NOT PRIVATE"
        body.append(
            [
                cell["method"],
                _budget(cell),
                _figure(cell, "accuracy", 100, 1, " %"),
                number(cell["claimed_epsilon"]),
                proven,
                "-" if cell["audited_epsilon"] is None else number(cell["audited_epsilon"]),
                _figure(cell, "membership_auc", 1, 3),
                _figure(cell, "membership_tpr", 100, 1, " %"),
                _figure(cell, "inversion_ssim", 1, 2),
            ]
        )
    return header, body


def reconstruction_table(
    made: Sequence[AttackedCell], show: Callable[[RepeatedClass], str] | None = None
) -> tuple[list[str], list[list[str]]]:
    """Header and rows in the layout of the LaDP-FL paper's Table X: budget, method, one column per class.

    Args:
        made: cells of the comparison.
        show: text of a class; default: distance and agreement by the public classifier, which has two more rows: its
            distances of another class and between private images.
    """
    labels = list(dict.fromkeys(label for cell in made for label in cell["gan"]))
    body = []
    for cell in sorted(made, key=lambda cell: (cell["epsilon_budget"] is not None, cell["epsilon_budget"] or 0.0)):
        if cell["gan"]:
            shown = [cell["gan"].get(label) for label in labels]
            body.append(
                [
                    _budget(cell),
                    cell["method"],
                    *("-" if found is None else (show or _reconstruction)(found) for found in shown),
                ]
            )
    header = ["budget", "method", *(f"class {label}" for label in labels)]
    if show is not None:
        return header, body
    first = next(cell["gan"] for cell in made if cell["gan"])
    nearest = {label: found["nearest_class"] for label, found in first.items()}
    floor = {label: found["floor"] for label, found in first.items()}
    for title, known in (("another class", nearest), ("private images", floor)):
        body.append(["-", f"({title})", *(f"{known[label]:.0f}" if label in known else "-" for label in labels)])
    return header, body


def markdown(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table for a results page."""
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _membership(target: Target) -> MembershipFigures:
    assembly = target.assembly()
    data = Images.of(assembly.dataset)
    if target.folder is None:
        raise ConfigError("membership is inferred from a finished run's model")
    module = module_of(assembly, target.folder)
    if not all(torch.isfinite(part).all() for part in module.parameters()):
        return {}  # a model that overflowed answers alike to everyone
    result = attack_outputs(module, data.train, data.test)["modified-entropy"]
    rate = min(result.rates, key=lambda rate: abs(rate.fpr - TPR_AT))
    return {
        "membership_auc": result.auc,
        "membership_auc_low": result.auc_low,
        "membership_auc_high": result.auc_high,
        "membership_tpr": rate.tpr,
    }


def _inversion(target: Target, victims: int, settings: InversionSettings) -> InversionFigures:
    first_round = Target(target.recipe)  # the initial model: what later rounds give away is not more
    findings = inversion.attack(first_round, count=victims, settings=settings)
    label = next((f.protection for f in findings if f.protection != inversion.UNPROTECTED), inversion.UNPROTECTED)
    scores = [score["ssim"] for f in findings if f.protection == label for score in f.scores]
    return {"inversion_ssim": _mean(scores), "inversion_clients": len(scores)}


def _gan(job: Job, label: int, attacks: Attacks) -> ClassFigures:
    raw = job.recipe.model_dump(exclude_none=True)
    if not job.recipe.data.partition.startswith("isolation"):
        recipes.override(raw, ["data.partition=isolation"])
    raw["data"]["private_class"] = label
    target, classifier = Target(recipes.validate(raw)), _classifier(raw)
    found = gan.attack(target, label=label, settings=attacks.gan, classifier=classifier, inception=attacks.inception)
    made: ClassFigures = {
        "distance": float(found.distance),
        "agreement": float(found.agreement),
        "nearest_class": float(found.nearest_class),
        "floor": float(found.floor),
        "accuracy": float(found.result["accuracy"]),
    }
    if found.inception_distance is not None and found.inception_floor is not None:
        made |= {
            "inception_distance": float(found.inception_distance),
            "inception_floor": float(found.inception_floor),
        }
    return made


_classifiers: dict[tuple[str, str | None], PublicClassifier] = {}


def _classifier(raw: dict[str, Any]) -> PublicClassifier:
    """One classifier per data set: distances are comparable only under the same one."""
    key = raw["data"]["name"], raw["data"].get("dir")
    if key not in _classifiers:
        from fedlgm import data

        found = Images.of(data.load(*key))
        _classifiers[key] = PublicClassifier.train(*found.test, found.classes)
    return _classifiers[key]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _spread(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def _budget(cell: AttackedCell) -> str:
    return "-" if cell["epsilon_budget"] is None else f"{cell['epsilon_budget']:g}"


def _figure(cell: AttackedCell, name: str, scale: float, digits: int, unit: str = "") -> str:
    known = cast(Mapping[str, float], cell)
    if name not in cell or not math.isfinite(known[name]):
        return "-"
    spread = f" ± {scale * known[f'{name}_std']:.{digits}f}" if cell["seeds"] > 1 else ""
    return f"{scale * known[name]:.{digits}f}{spread}{unit}"


def _inception(found: RepeatedClass) -> str:
    """Distance to the private images, and between halves of these."""
    spread = f" ± {found['inception_distance_std']:.1f}" if found["seeds"] > 1 else ""
    return f"{found['inception_distance']:.1f}{spread} (private images: {found['inception_floor']:.1f})"


def _reconstruction(found: RepeatedClass) -> str:
    if found["seeds"] == 1:
        return f"{found['distance']:.0f} ({found['agreement']:.0%})"
    agreement = f"{100 * found['agreement']:.0f} ± {100 * found['agreement_std']:.0f} %"
    return f"{found['distance']:.0f} ± {found['distance_std']:.0f} ({agreement})"
