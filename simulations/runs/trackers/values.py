"""Helpers for adapters of trackers: plain figures, and the tracker's run of a run folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedlgm.files import PUBLIC, write_durably
from simulations.runs.rows import excerpt

_SHOWN = (
    "guarantee",
    "guarantee_status",
    "ledger_head",
    "model_sha256",
    "delta",
    "noise_reproducible",
    "epsilon",
    "attack",
    "attack_rates",
)
_FILE = "trackers.json"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping, with keys joined by dots; lists become JSON.

    >>> flat({"run": {"seed": 1}, "model": {"hidden": [8, 8]}})
    {'run.seed': 1, 'model.hidden': '[8, 8]'}
    """
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = (
                json.dumps(value, default=str) if isinstance(value, list | tuple) else value
            )
    return result


def summary_figures(summary: Mapping[str, Any] | None) -> dict[str, Any]:
    """Figures of a run's summary for a tracker, with the guarantee and the success of an attacker
    for every epsilon.
    """
    return flat(excerpt(_SHOWN, summary or {}))


def run_identifier(folder: Path, tracker: str, create: Callable[[], str]) -> str:
    """The tracker's identifier of the run in `folder`, created the first time and then read from
    `trackers.json`.
    """
    file = folder / _FILE
    try:
        identifiers = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        identifiers = {}
    if tracker not in identifiers:
        identifiers[tracker] = create()
        write_durably(file, (json.dumps(identifiers) + "\n").encode(), PUBLIC)
    return str(identifiers[tracker])
