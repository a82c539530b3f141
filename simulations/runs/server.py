"""The server side of a run, which every engine's ServerApp calls."""

from __future__ import annotations

import logging
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from statistics import median_high

from flwr.serverapp import Grid

from fedlgm import mechanisms
from fedlgm.errors import DivergedError, Notice
from fedlgm.files import PRIVATE
from fedlgm.noise.release import ReleaseObserver
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.ledger import Ledger
from simulations import tools
from simulations.config.assembly import Assembly
from simulations.runs import strict_json
from simulations.runs.checkpoints import model_digest
from simulations.runs.folder import RunFolder
from simulations.runs.frozen import FrozenBase
from simulations.runs.recorder import Recorder
from simulations.runs.rows import FullRow, OnRound, RunSummary
from simulations.runs.start import Start, redraw, resume, warn_of_cost
from simulations.runs.statement import statement_of
from simulations.runs.stopping import StoppedEarly, privacy_figures
from simulations.runs.trackers import RunStart, Tracker, Trackers
from simulations.runs.watching import watch_of
from strategies import (
    AnyNode,
    CohortSampler,
    OneNodePerClient,
    Releaser,
    strategy_class,
)
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
            checkpoint of the last of them.
        FedlgmError: the run ends for another reason; the message says why.
    """
    logging.getLogger("flwr").setLevel(logging.ERROR)  # the rows of a run show its progress
    nodes = nodes or AnyNode(assembly.data.efforts)
    with folder.lock():
        if (summary := folder.final_summary()) is not None:
            return summary
        begun, audit = time.perf_counter(), watch_of(assembly)
        start = resume(assembly, folder, nodes)
        frozen = FrozenBase(assembly.model)
        with (
            _start_trackers(assembly, folder, start.transcript.rounds, trackers) as followers,
            Ledger(folder.ledger_file, folder.owner()) as ledger,
        ):
            if assembly.data.spent is not None:
                assembly.data.spent.charge(ledger)
            if not nodes.repeats:
                start = redraw(start, assembly, ledger, attempt)
            if not continued:
                warn_of_cost(ledger, start.transcript, start.abandoned)
            recorder = Recorder(
                assembly, folder, start.optimizer, progress, start.abandoned, followers,
                overlaps=nodes.repeats,
            )  # fmt: skip
            observer = None
            if audit is not None:
                observer = audit.observer(assembly, folder, start.keys, nodes.simulated)
            final = _run(grid, assembly, folder, start, ledger, nodes, recorder, observer)
            result = _summarise(assembly, folder, engine, final, recorder, ledger)
        result.update(frozen.check(final))
        if audit is not None:
            strict_json.write(folder.audit_file, audit.figures(assembly, folder, result), PRIVATE)
        rows = folder.rows(private=True)
        folder.finish(result)
        followers.end(result)
        return _for_operator(result, folder, rows, time.perf_counter() - begun)


def _run(
    grid: Grid,
    assembly: Assembly,
    folder: RunFolder,
    start: Start,
    ledger: Ledger,
    nodes: Nodes,
    recorder: Recorder,
    observer: ReleaseObserver | None,
) -> Transcript:
    """Run the remaining rounds, leave a checkpoint of the last round, and return what was released.

    Raises:
        DivergedError: a round's model is NaN or infinite.
    """
    recipe = assembly.recipe
    releaser = Releaser(
        start.keys,
        ledger,
        assembly.model.numerics,
        start.attempt,
        observer,
        start.noise,
        start.redrawn,
        mechanisms.is_own(recipe.mechanism.name),
        tools.release_log(assembly, folder, ledger) if recipe.run.keep_releases else None,
    )
    strategy = strategy_class(assembly.model.mechanism)(
        assembly.privacy.method,
        start.transcript,
        CohortSampler(recipe.sampling, start.draws, recipe.federation.dropout),
        start.optimizer,
        releaser,
        nodes,
        on_round=recorder,
        continue_ledger=True,  # warn_of_cost names what is charged again
    )
    try:
        with closing(recorder), suppress(StoppedEarly):
            recorder.check_stopped()
            strategy.start(
                grid,
                strategy.initial_arrays(),
                num_rounds=recipe.federation.rounds - start.transcript.rounds,
                timeout=nodes.round_timeout or 3600.0,
            )
    except DivergedError as error:
        recorder.checkpoint()
        diverged = folder.diverged.write(error)
        diverged.largest = error.largest
        raise diverged from error
    recorder.checkpoint()
    return strategy.transcript


def _summarise(
    assembly: Assembly,
    folder: RunFolder,
    engine: str,
    final: Transcript,
    recorder: Recorder,
    ledger: Ledger,
) -> RunSummary:
    """The run's public figures."""
    recipe = assembly.recipe
    guarantee = ledger.guarantee() or (final.plan.guarantee if final.plan else None)
    result: RunSummary = {
        "run": str(folder.path),
        "recipe": recipe.name,
        "engine": engine,
        "mechanism": recipe.mechanism.name,
        "variant": recipe.mechanism.variant,
        "rounds": final.rounds,
        "unit": recipe.unit,
        **privacy_figures(recipe, ledger, guarantee),  # type: ignore[typeddict-item]
        "noise_multiplier": assembly.privacy.facts.noise_multiplier,
        "noise_backend": assembly.model.numerics.noise_backend,
        "device": str(assembly.model.device),
        "model_sha256": model_digest(final.models[-1]),
        "ledger_head": str(ledger.head()),
    }
    result.update(recorder.figures(final))  # type: ignore[typeddict-item]
    if guarantee is not None:
        result["statement"] = statement_of(
            recipe, ledger, guarantee, final.rounds, assembly.model.numerics.noise_backend
        )
    return result


def _for_operator(
    result: RunSummary, folder: RunFolder, rows: list[FullRow], seconds: float
) -> RunSummary:
    """The summary with figures that only the operator sees and that the stored summary omits.

    Durations and failures of rounds reveal participants, and canaries see sums before their noise.
    """
    seen = result.copy()
    seen.update(folder.audit_summary())
    seen["failures"] = _failures(rows)
    durations = [row["seconds"] for row in rows if "seconds" in row]
    seen["seconds_per_round"] = median_high(durations or [0.0])
    seen["seconds"] = seconds
    return seen


def nodes_of(
    assembly: Assembly, kind: str, *, simulated: bool = False, keyed: bool = False
) -> Nodes:
    """The assignment of nodes to clients from the run config of a Flower app.

    Args:
        assembly: the run's objects.
        kind: "workers" (any node serves any client: simulations) or "clients" (one node per
            client).
        simulated: whether "clients" are simulated SuperNodes, so that a public seed is allowed.
        keyed: whether clients without a seed have keys that outlive a run of Flower, such as the
            keys in the run's folder.
    """
    federation, run = assembly.recipe.federation, assembly.recipe.run
    keyed = keyed or run.seed is not None
    if kind == "workers":
        return AnyNode(assembly.data.efforts, federation.wait_for_nodes, keyed)
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
    """Start the run's trackers. If the block raises an error, they end; otherwise they end with the
    run's summary.
    """
    recipe, layers = assembly.recipe, assembly.model.layers
    trackers = Trackers(recipe.run.trackers, objects)
    sizes = dict(zip(layers.names, layers.sizes.tolist(), strict=True))
    trackers.start(
        RunStart(
            recipe.name,
            folder.path,
            recipe.model_dump(mode="json", exclude_none=True),
            sizes,
            assembly.privacy.facts,
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
