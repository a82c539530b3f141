"""The server side of a run, which every engine's ServerApp calls."""

from __future__ import annotations

import logging
import secrets
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from statistics import median_high

from flwr.serverapp import Grid

from fedlgm.errors import DivergedError, Notice, RunError
from fedlgm.files import PRIVATE
from fedlgm.noise.run_noise import RunNoise
from fedlgm.planning import charging
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.ledger import Ledger
from simulations.config.assembly import Assembly
from simulations.runs import strict_json
from simulations.runs.checkpoints import model_digest
from simulations.runs.folder import RunFolder
from simulations.runs.frozen import FrozenBase
from simulations.runs.protection import is_own
from simulations.runs.provenance import provenance_of
from simulations.runs.recorder import Recorder
from simulations.runs.rows import FullRow, OnRound, RunSummary
from simulations.runs.stopping import StoppedEarly
from simulations.runs.trackers import RunStart, Tracker, Trackers
from simulations.runs.watching import watch_of
from strategies import AnyNode, CohortSampler, LayerwiseFedAvg, OneNodePerClient, Releaser
from strategies.nodes import Nodes

TEST_MODE = (
    "run.test_mode: real nodes run with a public seed: anyone who knows it can subtract all noise"
)


def serve(
    grid: Grid,
    assembly: Assembly,
    folder: RunFolder,
    engine: str,
    progress: OnRound | None = None,
    *,
    nodes: Nodes | None = None,
    trackers: Sequence[Tracker] = (),
    attempt: bytes = b"",
    continued: bool = False,
) -> RunSummary:
    """Run (or continue) a federation over `grid` and return its summary; a finished run releases
    nothing more.

    Args:
        grid: grid of the clients.
        assembly: the run's objects.
        folder: the run's folder; a checkpoint in it is continued.
        engine: name of the engine, for the summary.
        progress: called with each round's row, the operator's own figures included.
        nodes: assignment of nodes to clients; by default workers of a simulation, any of which
            serves any client.
        trackers: objects that follow the run, in addition to the recipe's trackers.
        attempt: identity of the releases of nodes that do not repeat their answers; drawn if not
            given.
        continued: whether an earlier process had this identity, so that its last round is not
            charged again.

    Raises:
        DivergedError: a round's model is NaN or infinite. Earlier rounds are kept, with a
            checkpoint of the last.
        FedlgmError: the run ends for another reason; the message says why.
    """
    logging.getLogger("flwr").setLevel(logging.ERROR)  # what a run does shows in its rows
    nodes = nodes or AnyNode(assembly.efforts)
    with folder.lock():
        if (
            folder.result() is not None
        ):  # its checkpoints may have been removed since, as its keys were
            finished = folder.verified_result()
            finished.update(folder.audit_summary())
            folder.forget_noise()
            return finished
        folder.provenance.settle(provenance_of(assembly, nodes))
        folder.verify()
        recipe, layers = assembly.recipe, assembly.layers
        federation = recipe.federation
        optimizer = assembly.server_optimizer()
        checkpoint = folder.checkpoints.latest(layers)
        transcript = assembly.start() if checkpoint is None else checkpoint.transcript
        if checkpoint is not None:
            optimizer.restore(transcript.models[-1], checkpoint.optimizer)
        _check_continued(assembly, folder, transcript)
        folder.truncate(transcript.rounds)
        folder.diverged.forget()
        keys, abandoned = folder.keys(recipe.run.seed, checkpoint)
        run_noise = (
            RunNoise()
            if assembly.facts.noise is None
            else folder.run_noise(recipe.run.seed, checkpoint)
        )
        base = FrozenBase(assembly)
        started = time.perf_counter()
        with (
            _start_trackers(assembly, folder, transcript.rounds, trackers) as followers,
            Ledger(folder.ledger_file, folder.owner()) as ledger,
        ):
            if assembly.spent is not None:
                assembly.spent.charge(ledger)
            # Real nodes make other updates when a round is made again, unless they keep their
            # answers.
            repeats, redrawn = nodes.repeats, abandoned
            attempt = b"" if repeats else attempt or secrets.token_bytes(16)
            draws = keys
            if not repeats:
                abandoned = ledger.position()
                if (
                    keys.secret
                    and charging.of(assembly.facts).run is None
                    and recipe.protects.redraws
                ):
                    # Other clients than before: sampling then amplifies what is released again,
                    # too.
                    draws, redrawn = keys.derive(b"draws", attempt), abandoned
            if not continued:
                _warn_of_cost(ledger, transcript, abandoned)
            recorder = Recorder(
                assembly, folder, optimizer, progress, abandoned, followers, overlaps=repeats
            )
            audit = watch_of(assembly)
            canaries = (
                audit.observer(assembly, folder, keys, nodes.simulated)
                if audit is not None
                else None
            )
            strategy = LayerwiseFedAvg(
                assembly.method,
                transcript,
                CohortSampler(assembly.cohorts, draws, federation.dropout),
                optimizer,
                Releaser(
                    keys,
                    ledger,
                    assembly.numerics,
                    attempt,
                    canaries,
                    run_noise,
                    redrawn,
                    is_own(recipe),
                ),
                nodes,
                on_round=recorder,
                continue_ledger=True,  # _warn_of_cost names what is charged again
            )
            try:
                with closing(recorder), suppress(StoppedEarly):
                    recorder.check_stopped()
                    strategy.start(
                        grid,
                        strategy.initial_arrays(),
                        num_rounds=federation.rounds - transcript.rounds,
                        timeout=nodes.round_timeout or 3600.0,
                    )
            except DivergedError as error:
                recorder.checkpoint()
                diverged = folder.diverged.write(error)
                diverged.largest = error.largest
                raise diverged from error
            recorder.checkpoint()
            final, head = strategy.transcript, ledger.head()
            figures, stated = recorder.figures(final), ledger.guarantee()
        seeded = recipe.run.seed is not None
        guarantee = stated or (final.plan.guarantee if final.plan else None)
        rows = folder.rows(private=True)
        result: RunSummary = {
            "run": str(folder.path),
            "recipe": recipe.name,
            "engine": engine,
            "mechanism": recipe.mechanism.name,
            "variant": recipe.mechanism.variant,
            "rounds": final.rounds,
            "unit": recipe.unit,
            "delta": recipe.privacy.delta,
            "noise_reproducible": seeded,
            "guarantee": guarantee.sentence(noise_reproducible=seeded) if guarantee else "",
            "guarantee_status": guarantee.status if guarantee else "none",
            "noise_multiplier": assembly.facts.noise_multiplier,
            "noise_backend": assembly.noise_backend,
            "device": str(assembly.device),
            "model_sha256": model_digest(final.models[-1]),
            "ledger_head": str(head),
        }
        result.update(figures)  # type: ignore[typeddict-item]
        result.update(base.check(final))
        if audit is not None:
            strict_json.write(folder.audit_file, audit.figures(assembly, folder, result), PRIVATE)
        folder.finish(result)
        followers.end(result)
        # Durations and failures of rounds reveal participants, and canaries see sums before their
        # noise. Only the operator sees these figures; the stored summary omits them.
        seen = result.copy()
        seen.update(folder.audit_summary())
        seen["failures"] = _failures(rows)
        seen["seconds_per_round"] = median_high(
            [row["seconds"] for row in rows if "seconds" in row] or [0.0]
        )
        seen["seconds"] = time.perf_counter() - started
    return seen


def _check_continued(assembly: Assembly, folder: RunFolder, transcript: Transcript) -> None:
    """Refuse a checkpoint of more rounds than the run has, and a run that is one mechanism with
    other noise.

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
    started, facts = transcript.plan.facts, assembly.facts
    if charging.of(facts).run is not None and started.least_multiplier != facts.least_multiplier:
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


def nodes_of(
    assembly: Assembly, kind: str, *, simulated: bool = False, keyed: bool = False
) -> Nodes:
    """The assignment of nodes to clients from the run config of a Flower app.

    Args:
        assembly: the run's objects.
        kind: "workers" (any node serves any client: simulations) or "clients" (one node per
            client).
        simulated: whether "clients" are simulated SuperNodes, so that a public seed is allowed.
        keyed: whether clients without a seed have keys that outlive a run of Flower, as those of
            the run's folder.
    """
    federation, run = assembly.recipe.federation, assembly.recipe.run
    keyed = keyed or run.seed is not None
    if kind == "workers":
        return AnyNode(assembly.efforts, federation.wait_for_nodes, keyed)
    if run.test_mode and run.seed is not None and not simulated:
        warnings.warn(Notice(TEST_MODE), stacklevel=2)
    return OneNodePerClient(
        federation.wait_for_nodes,
        federation.round_timeout,
        federation.quorum,
        federation.max_failures,
        simulated,
        run.test_mode,
        keyed,
    )


@contextmanager
def _start_trackers(
    assembly: Assembly, folder: RunFolder, done: int, objects: Sequence[Tracker]
) -> Iterator[Trackers]:
    """The run's trackers, started; an error ends them, otherwise the run's summary does."""
    recipe, layers = assembly.recipe, assembly.layers
    trackers = Trackers(recipe.run.trackers, objects)
    sizes = dict(zip(layers.names, layers.sizes.tolist(), strict=True))
    trackers.start(
        RunStart(
            recipe.name,
            folder.path,
            recipe.model_dump(mode="json", exclude_none=True),
            sizes,
            assembly.facts,
            done,
        )
    )
    try:
        yield trackers
    except BaseException:
        trackers.end(None)
        raise


def _failures(rows: list[FullRow]) -> dict[str, int]:
    """Number of failures by node and kind; empty in a run without failures."""
    return dict(
        Counter(
            f"node {failure['node']}: {failure['kind']}"
            if failure["node"] is not None
            else "a client without a node"
            for row in rows
            for failure in row.get("failures", ())
        )
    )


def _warn_of_cost(ledger: Ledger, transcript: Transcript, abandoned: int) -> None:
    """Warn if released rounds are about to be released again with new noise."""
    again = ledger.rounds(through=abandoned) - transcript.rounds
    if again > 0:
        warnings.warn(
            f"{again} rounds that had been released are released again with fresh noise, because "
            "they cannot be repeated bit by bit: the run will cost more than its budget, and its "
            "report states the cost",
            stacklevel=3,
        )
