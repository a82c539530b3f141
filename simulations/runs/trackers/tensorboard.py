"""TensorBoard: event files in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulations.runs.trackers import RunStart, scalars
from simulations.runs.trackers.values import summary_figures


class TensorBoardTracker:
    """Writes `tensorboard/` in the run folder; open it with `tensorboard --logdir RUN`."""

    def start(self, run: RunStart) -> None:
        """Open the event file; for a resumed run, remove later rounds, which will be repeated."""
        from torch.utils.tensorboard import SummaryWriter

        purge = run.rounds_done + 1 if run.rounds_done else None
        self._board: Any = SummaryWriter(
            str(run.folder / "tensorboard"), purge_step=purge, flush_secs=5
        )
        self._layers = tuple(run.layers)

    def round(self, row: Mapping[str, Any]) -> None:
        """Write one scalar per figure, all in one event; `add_scalar` would queue and hash each in
        Python.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in scalars(row, self._layers).items()
        ]
        # Real times between rounds would show how many clients took part.
        self._board.file_writer.add_summary(
            Summary(value=values), row["round"], walltime=float(row["round"])
        )

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """Add epsilon, the guarantee and the success of an attacker as texts."""
        if summary is not None:
            last = int(summary["rounds"])
            for name, value in summary_figures(summary).items():
                self._board.add_text(name, str(value), last, walltime=float(last))
        self._board.close()
