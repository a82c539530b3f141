"""Records finished rounds as metrics, checkpoints, trackers' figures and progress, while the next
round trains.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from os.path import exists

import torch
from torch import Tensor, nn

from fedlgm.extension.restored import fresh
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.ledger import Ledger
from fedlgm.training import inputs
from fedlgm.training.devices import drawing
from fedlgm.training.tasks import evaluate
from fedlgm.training.tasks.own_figures import own_figures
from simulations.config.assembly import Assembly
from simulations.runs.folder import RunFolder
from simulations.runs.rows import (
    Figures,
    OnRound,
    RoundRow,
    private_row,
    released_figures,
    round_row,
)
from simulations.runs.stopping import Patience, StoppedEarly, reported_rounds, spending
from simulations.runs.trackers import Trackers
from strategies import RoundRecord
from strategies.server_optimizer import ResumableStep

# rounds that may wait for their evaluation, so that evaluation does not fall behind without bound
_IN_FLIGHT = 2


def measure(assembly: Assembly, module: nn.Module, round: int) -> dict[str, float]:
    """Metrics of a released model on the test set, including those of a user's functions. Without
    test examples there are no metrics.

    Args:
        assembly: the run's objects.
        module: the model.
        round: number of its round; 0 is the initial model.
    """
    data, own = assembly.data.dataset, assembly.own
    if not len(data.test_y):
        return {}
    x, y = inputs.tensors(data.test_x), torch.from_numpy(data.test_y)
    metrics = evaluate(fresh(assembly.data.task), module, x, y, metrics=own.metrics)
    if own.evaluate is not None:
        metrics |= own_figures(own.evaluate, round, module, metrics)
    return metrics


class Recorder:
    """Receives each finished round and records it in its own thread, in order.

    A round's metrics are written before its checkpoint, so a run that is resumed from a checkpoint
    has all rows up to the checkpoint.

    Args:
        assembly: the run's objects.
        folder: the run's folder.
        optimizer: server optimizer, whose state goes into checkpoints.
        progress: called with each row, the operator's own figures included.
        abandoned: see `Ledger.epsilon`.
        trackers: started trackers; they get each public row.
        overlaps: whether the next round may begin before a round is on disk; False if clients would
            be charged again for a round that is lost.
    """

    def __init__(
        self,
        assembly: Assembly,
        folder: RunFolder,
        optimizer: ResumableStep,
        progress: OnRound | None = None,
        abandoned: int = 0,
        trackers: Trackers | None = None,
        *,
        overlaps: bool = True,
    ) -> None:
        self._assembly, self._folder, self._optimizer, self._progress = (
            assembly,
            folder,
            optimizer,
            progress,
        )
        self._module, self._abandoned = assembly.model.module(), abandoned
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="recorder")
        self._pending: deque[Future[None]] = deque()
        self._in_flight = _IN_FLIGHT if overlaps else 0
        self._trackers = trackers or Trackers()
        patience, task = assembly.recipe.run.patience, assembly.data.task
        self._rule = None if patience is None else Patience(patience, task.headline, task.better)
        self._latest: tuple[int, Figures] = (-1, {})
        self._finished: tuple[Transcript, dict[str, Tensor]] | None = None

    def __call__(self, record: RoundRecord, transcript: Transcript) -> None:
        """Take over one finished round."""
        self._finished = transcript, self._optimizer.state()
        self._pending.append(self._thread.submit(self._record, record, *self._finished))
        evaluated = record.round % self._assembly.recipe.run.evaluate_every == 0
        while len(self._pending) > (0 if self._rule is not None and evaluated else self._in_flight):
            self._pending.popleft().result()
        if evaluated:
            self.check_stopped()

    def check_stopped(self) -> None:
        """Raise StoppedEarly if the run's rule for stopping holds.

        A run that released a round twice goes on. If it ended, it would state a budget that is
        smaller than its cost.
        """
        if self._rule is not None and self._rule.holds(self._folder.rows()):
            with Ledger(self._folder.ledger_file) as ledger:
                if not ledger.has_repeated_rounds():
                    raise StoppedEarly

    def close(self) -> None:
        """Wait until everything is written, and raise errors of the recording thread."""
        try:
            while self._pending:
                self._pending.popleft().result()
        finally:
            native = self._thread.submit(threading.get_native_id).result()
            self._thread.shutdown()
            # The thread may have used MKL, whose locks it holds while the system ends it. Python
            # before 3.13 does not wait for that, and a fork at that moment could not compute.
            while exists(f"/proc/self/task/{native}"):
                time.sleep(0.001)

    def checkpoint(self) -> None:
        """Write a checkpoint after the last finished round if it has no checkpoint. Call this after
        `close`.
        """
        if (
            self._finished is not None
            and self._folder.checkpoints.rounds() < self._finished[0].rounds
        ):
            self._folder.save(*self._finished)

    def figures(self, transcript: Transcript) -> Figures:
        """The task's metrics of the current model on the test set, and the epsilon proven and
        claimed so far.
        """
        if self._latest[0] != transcript.rounds:
            self._latest = transcript.rounds, self._measure(transcript)
        return self._latest[1].copy()

    def _measure(self, transcript: Transcript) -> Figures:
        self._assembly.model.layers.load_(self._module, transcript.models[-1])
        metrics = measure(self._assembly, self._module, transcript.rounds)
        recipe = self._assembly.recipe
        with Ledger(
            self._folder.ledger_file
        ) as ledger:  # a separate reader, because the next round is already being charged
            figures: Figures = {
                "metrics": metrics,
                "headline": self._assembly.data.task.headline,
                **spending(recipe, ledger, transcript.rounds, self._abandoned),  # type: ignore[typeddict-item]
            }
        facts = self._assembly.privacy.facts
        readers = facts.noised_by.readers_epsilon(facts, reported_rounds(recipe, transcript.rounds))
        if readers is not None:
            figures["readers_epsilon"] = readers
        figures |= {name: metrics[name] for name in ("loss", "accuracy") if name in metrics}  # type: ignore[typeddict-item]
        return figures

    def _record(
        self, record: RoundRecord, transcript: Transcript, optimizer: dict[str, Tensor]
    ) -> None:
        run = self._assembly.recipe.run
        last = record.round == self._assembly.recipe.federation.rounds
        row: RoundRow = {**round_row(record), **released_figures(transcript)}
        private = private_row(record)
        if last or record.round % run.evaluate_every == 0:
            row.update(self.figures(transcript))  # type: ignore[typeddict-item]
        self._folder.append(row, private)
        self._trackers.round(row)
        if last or record.round % run.checkpoint_every == 0:
            self._folder.save(transcript, optimizer)
        if self._progress is not None:
            with drawing():  # a user's function, in the thread beside the training
                self._progress({**private, **row})
