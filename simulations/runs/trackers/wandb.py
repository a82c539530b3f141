"""Weights & Biases, with one W&B run per run folder; WANDB_PROJECT, WANDB_MODE and similar
variables work as usual.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from typing import Any

from simulations.runs.trackers import RunStart, scalars
from simulations.runs.trackers.values import flat, run_identifier, summary_figures


class WandbTracker:
    """Logs the recipe as the configuration, rounds as history, and guarantee and ledger head into
    the summary.

    A resumed run continues the same W&B run. Only public figures are sent. System metrics, the
    console and the code are switched off, because times and memory reveal the number of
    participants.

    Args:
        project: name of the project; by default $WANDB_PROJECT, else "fedlgm".
        settings: further arguments of `wandb.init`.
    """

    def __init__(self, project: str | None = None, **settings: Any) -> None:
        self._project = project or os.environ.get("WANDB_PROJECT", "fedlgm")
        self._settings = settings

    def start(self, run: RunStart) -> None:
        """Create the W&B run, or continue the W&B run of a resumed run."""
        import wandb

        quiet = wandb.Settings(
            console="off",
            x_disable_stats=True,
            x_disable_meta=True,
            disable_git=True,
            x_save_requirements=False,
        )
        arguments: dict[str, Any] = {
            "project": self._project,
            "name": run.folder.name,
            "dir": str(run.folder),
            "id": run_identifier(run.folder, "wandb", lambda: secrets.token_hex(4)),
            "resume": "allow",
            "config": flat(run.recipe) | {"noise_multiplier": run.facts.noise_multiplier},
            "settings": quiet,
        }
        self._run = wandb.init(**(arguments | self._settings))
        self._layers, self._zero = tuple(run.layers), time.time() - run.rounds_done

    def round(self, row: Mapping[str, Any]) -> None:
        """Log one step of the history."""
        # Real times between rounds would show how many clients took part.
        figures = scalars(row, self._layers) | {"_timestamp": self._zero + row["round"]}
        self._run.log(figures, step=row["round"])

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """Write the summary; an interrupted run is marked as failed."""
        self._run.summary.update(summary_figures(summary))
        self._run.finish(exit_code=0 if summary is not None else 1)
