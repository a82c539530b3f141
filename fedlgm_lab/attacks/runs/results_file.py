"""Stores the results of membership attacks on a finished run in its folder, for its operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import cast

from typing_extensions import TypedDict

from fedlgm.files import PRIVATE
from fedlgm.privacy.guarantee import Unit
from fedlgm_lab.attacks.membership import MembershipResult
from simulations.runs import strict_json
from simulations.runs.folder import RunFolder
from simulations.runs.shapes import read_json

_REMEDY = "delete it, and attack the run again"


class KeptRate(TypedDict):
    """A measured true-positive rate (`fedlgm_lab.attacks.membership.Rate`)."""

    fpr: float
    tpr: float
    low: float
    high: float
    fpr_high: float


class KeptAttack(TypedDict):
    """An attack's rates, and the unit whose membership it inferred."""

    unit: str
    rates: list[KeptRate]


def keep(folder: RunFolder, unit: Unit, results: Mapping[str, MembershipResult]) -> None:
    """Add results to the run's folder; a repeated attack replaces its earlier result. The file is
    only for the operator, because the results depend on the run's members.

    Args:
        folder: the attacked run.
        unit: unit of membership.
        results: results by the attack's name.
    """
    kept = read(folder)
    for name, result in results.items():
        kept[f"{name} ({unit}s)"] = {
            "unit": unit,
            "rates": [cast(KeptRate, asdict(rate)) for rate in result.rates],
        }
    strict_json.write(_file(folder), kept, PRIVATE)


def read(folder: RunFolder) -> dict[str, KeptAttack]:
    """Read the stored results by the attack's name; empty if the run was not attacked.

    Raises:
        RunError: the file is damaged.
    """
    file = _file(folder)
    attacks: dict[str, KeptAttack] = (
        read_json(file, dict[str, KeptAttack], _REMEDY) if file.is_file() else {}
    )
    return attacks


def _file(folder: RunFolder) -> Path:
    return folder.private / "attacks.json"
