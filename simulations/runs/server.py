"""The server side of a run: what every engine's ServerApp calls."""

from __future__ import annotations

import logging
import time
import warnings
from statistics import median_high
from typing import Any

from flwr.serverapp import Grid

from fedlgm.keys import KeyRing
from fedlgm.privacy.ledger import Ledger
from fedlgm.transcript import Transcript
from simulations.config.assembly import Assembly
from simulations.config.recipe import Recipe
from simulations.runs.recorder import OnRound, Recorder
from simulations.runs.folder import RunFolder, model_digest
from strategies import CohortSampler, LayerwiseFedAvg, ServerOptimizer


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
    logging.getLogger("flwr").setLevel(logging.ERROR)  # what a run does shows in its rows
    with folder.locked():
        folder.verify()
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
            recorder = Recorder(assembly, folder, optimizer, progress, _abandoned(ledger, recipe, transcript))
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
                threads=recipe.run.threads,
                device=assembly.device,
                noise_backend=assembly.noise_backend,
            )
            try:
                strategy.start(grid, strategy.initial_arrays(), num_rounds=federation.rounds - transcript.rounds)
            finally:
                recorder.close()
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
                "seeded": recipe.run.seed is not None,
                "guarantee": plan.guarantee.sentence() if plan else "",
                "guarantee_status": plan.guarantee.status if plan else "none",
                "noise_multiplier": assembly.budget.noise_multiplier,
                "noise_backend": assembly.noise_backend,
                "device": str(assembly.device),
                "model_sha256": model_digest(final.models[-1]),
                "seconds_per_round": median_high([row["seconds"] for row in folder.rows()] or [0.0]),
                "seconds": time.perf_counter() - started,
            }
        folder.finish(result)
    return result


def _abandoned(ledger: Ledger, recipe: Recipe, transcript: Transcript) -> int:
    """Position up to which the ledger's rows will not be repeated: all that a run without a seed has made so far."""
    if recipe.run.seed is not None:
        return 0
    again = ledger.rounds() - transcript.rounds
    if again > 0:
        warnings.warn(
            f"without a seed, {again} rounds that had been released are released again with fresh noise: the run will "
            "cost more than its budget, and reports what it costs (run.checkpoint_every = 1 keeps this small)",
            stacklevel=2,
        )
    return ledger.position()
