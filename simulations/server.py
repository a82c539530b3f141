"""The server side of a run: strategy, evaluation, metrics, checkpoints. Called by every engine's ServerApp."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedlgm.keys import KeyRing
from fedlgm.privacy.ledger import Ledger
from fedlgm.training import evaluate
from fedlgm.transcript import Transcript
from simulations.assembly import Assembly
from simulations.run_folder import RunFolder, model_digest
from strategies import CohortSampler, LayerwiseFedAvg, RoundRecord, ServerOptimizer

OnRound = Callable[[dict[str, Any]], None]


@dataclass
class Recorder:
    """Turns finished rounds into metrics, checkpoints and progress."""

    assembly: Assembly
    folder: RunFolder
    ledger: Ledger
    optimizer: ServerOptimizer
    progress: OnRound | None = None

    def __post_init__(self) -> None:
        self._module = self.assembly.module()

    def __call__(self, record: RoundRecord, transcript: Transcript) -> None:
        """Record one round: metrics first, then the checkpoint that makes it final."""
        run, rounds = self.assembly.recipe.run, self.assembly.recipe.federation.rounds
        last = record.round == rounds
        plan = record.plan
        row: dict[str, Any] = {
            "round": record.round,
            "cohort": record.cohort,
            "discarded": record.discarded,
            "seconds": record.seconds,
            "noise_norm": float((plan.noise_norms**2).sum() ** 0.5),
            "clip": plan.clip.tolist(),
            "released": int(plan.released.sum()),
        }
        if last or record.round % run.evaluate_every == 0:
            row |= self.figures(transcript)
        self.folder.append(row)
        if last or record.round % run.checkpoint_every == 0:
            self.folder.save(transcript, self.optimizer.state())
        if self.progress is not None:
            self.progress(row)

    def figures(self, transcript: Transcript) -> dict[str, Any]:
        """Loss and accuracy of the current model on the test set; epsilon proven and claimed so far."""
        data, privacy = self.assembly.dataset, self.assembly.recipe.privacy
        self.assembly.layers.load_(self._module, transcript.models[-1])
        loss, accuracy = evaluate(self._module, torch.from_numpy(data.test_x), torch.from_numpy(data.test_y))
        return {
            "loss": loss,
            "accuracy": accuracy,
            "epsilon": self.ledger.epsilon(privacy.delta, privacy.accountant),
            "claimed_epsilon": self.ledger.claimed_epsilon(privacy.delta, privacy.accountant),
        }


def serve(
    grid: Grid, assembly: Assembly, folder: RunFolder, keys: KeyRing, engine: str, progress: OnRound | None = None
) -> dict[str, Any]:
    """Run (or continue) a federation over `grid` and return its summary.

    Args:
        grid: where the clients are.
        assembly: the run's objects.
        folder: the run's folder; a checkpoint in it is continued.
        keys: secret ring of cohorts and noise.
        engine: name of the engine, for the summary.
        progress: called with each round's metrics row.
    """
    recipe, layers = assembly.recipe, assembly.layers
    federation = recipe.federation
    optimizer = ServerOptimizer(federation.server_optimizer, federation.server_lr, federation.server_momentum)
    checkpoint = folder.latest(layers)
    transcript = assembly.start() if checkpoint is None else checkpoint.transcript
    if checkpoint is not None:
        optimizer.restore(transcript.models[-1], checkpoint.optimizer)
    folder.truncate(transcript.rounds)
    started = time.perf_counter()
    with Ledger(folder.ledger_file, folder.owner()) as ledger:
        recorder = Recorder(assembly, folder, ledger, optimizer, progress)
        strategy = LayerwiseFedAvg(
            assembly.mechanism,
            layers,
            assembly.budget,
            transcript,
            CohortSampler(assembly.budget.sampling, keys, federation.dropout),
            optimizer,
            keys,
            ledger,
            block_size=recipe.run.block_size,
            work=assembly.sizes,
            max_participations=recipe.privacy.max_participations,
            on_round=recorder,
        )
        strategy.start(grid, strategy.initial_arrays(), num_rounds=federation.rounds - transcript.rounds)
        final = strategy.transcript
        plan = final.plan
        figures = recorder.figures(final)
        result = {
            "run": str(folder.path),
            "recipe": recipe.name,
            "engine": engine,
            "mechanism": recipe.mechanism.name,
            "variant": recipe.mechanism.variant,
            "rounds": final.rounds,
            **figures,
            "delta": recipe.privacy.delta,
            "guarantee": plan.guarantee.sentence() if plan else "",
            "guarantee_status": plan.guarantee.status if plan else "none",
            "noise_multiplier": assembly.budget.noise_multiplier,
            "model_sha256": model_digest(final.models[-1]),
            "seconds_per_round": _median([row["seconds"] for row in folder.rows()]),
            "seconds": time.perf_counter() - started,
        }
    folder.finish(result)
    return result


def server_app(
    assembly: Assembly, folder: RunFolder, keys: KeyRing, engine: str, progress: OnRound | None = None
) -> ServerApp:
    """`serve` as a Flower ServerApp."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, assembly, folder, keys, engine, progress)

    return app


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0
