"""Where a run begins or continues: its newest checkpoint, its keys, and what is released again."""

from __future__ import annotations

import secrets
import warnings
from dataclasses import dataclass, replace

from fedlgm.errors import RunError
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.run_noise import RunNoise
from fedlgm.planning import charging
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.ledger import Ledger
from simulations.config.assembly import Assembly
from simulations.runs.folder import RunFolder
from simulations.runs.provenance import provenance_of
from strategies.nodes import Nodes
from strategies.server_optimizer import ResumableStep


@dataclass(frozen=True)
class Start:
    """The state from which a run begins or continues.

    Attributes:
        transcript: released models and plans.
        optimizer: the server's step.
        keys: keys of noise, clients and draws.
        draws: keys of the cohorts' draws.
        abandoned: position in the ledger up to which charged rounds are made again.
        redrawn: position in the ledger up to which such rounds draw other cohorts. Sampling then
            amplifies them again.
        noise: the run's own noise, if all rounds are one mechanism.
        attempt: identity of releases that nodes do not repeat; empty if they do.
    """

    transcript: Transcript
    optimizer: ResumableStep
    keys: KeyRing
    draws: KeyRing
    abandoned: int
    redrawn: int
    noise: RunNoise
    attempt: bytes = b""


def resume(assembly: Assembly, folder: RunFolder, nodes: Nodes) -> Start:
    """The state of the latest checkpoint, or the state before the first round. Later rows are
    removed.

    Raises:
        RunError: the run was started with other objects, files or clients, or cannot go on from its
            files.
        LedgerError: the ledger does not fit the run.
    """
    folder.provenance.settle(provenance_of(assembly, nodes))
    folder.verify()
    seed = assembly.recipe.run.seed
    optimizer = assembly.model.server_optimizer()
    checkpoint = folder.checkpoints.latest(assembly.model.layers)
    transcript = assembly.privacy.start() if checkpoint is None else checkpoint.transcript
    if checkpoint is not None:
        optimizer.restore(transcript.models[-1], checkpoint.optimizer)
    _check_continued(assembly, folder, transcript)
    folder.truncate(transcript.rounds)
    folder.diverged.forget()
    keys, abandoned = folder.keys(seed, checkpoint)
    noise = (
        RunNoise() if assembly.privacy.facts.noise is None else folder.run_noise(seed, checkpoint)
    )
    return Start(transcript, optimizer, keys, keys, abandoned, abandoned, noise)


def redraw(start: Start, assembly: Assembly, ledger: Ledger, attempt: bytes) -> Start:
    """The start of a run whose nodes make other updates when a round is repeated. Real nodes do so
    unless they keep their answers.
    """
    attempt, abandoned = attempt or secrets.token_bytes(16), ledger.position()
    start = replace(start, attempt=attempt, abandoned=abandoned)
    one_mechanism = charging.of(assembly.privacy.facts).joint
    if not start.keys.secret or one_mechanism or not assembly.recipe.protects.redraws:
        return start
    # Other clients are drawn than before, so sampling also amplifies what is released again.
    return replace(start, draws=start.keys.derive(b"draws", attempt), redrawn=abandoned)


def _check_continued(assembly: Assembly, folder: RunFolder, transcript: Transcript) -> None:
    """Refuse a checkpoint of more rounds than the run has. Also refuse a run that is one mechanism
    if this machine would give it other noise.

    Raises:
        RunError: the checkpoint was edited; or this machine computes other coefficients, or another
            multiplier.
    """
    rounds = assembly.recipe.federation.rounds
    if transcript.rounds > rounds:
        raise RunError(
            f"the newest checkpoint of {folder.path} was made after {transcript.rounds} rounds, "
            f"but the run has {rounds}: it was edited; restore it from a backup, or delete it"
        )
    if transcript.plan is None:
        return
    started, facts = transcript.plan.facts, assembly.privacy.facts
    if charging.of(facts).joint and started.least_multiplier != facts.least_multiplier:
        raise RunError(
            f"{folder.path} has a noise multiplier of {started.noise_multiplier:.12g}, but this "
            f"machine computes {facts.noise_multiplier:.12g} (another version of fedlgm or "
            "dp-accounting?): all rounds are one mechanism; continue it where it was started"
        )
    if started.noise != facts.noise:
        raise RunError(
            f"{folder.path} correlated its noise with coefficients that differ from those that "
            "this machine computes (another version of NumPy or SciPy?): continue it where it was "
            "started"
        )


def warn_of_cost(ledger: Ledger, transcript: Transcript, abandoned: int) -> None:
    """Warn if released rounds are about to be released again with new noise."""
    again = ledger.rounds(through=abandoned) - transcript.rounds
    if again > 0:
        warnings.warn(
            f"{again} rounds that had been released are released again with fresh noise, because "
            "they cannot be repeated bit by bit: the run will cost more than its budget, and its "
            "report states the cost",
            stacklevel=3,
        )
