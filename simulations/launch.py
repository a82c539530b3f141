"""Starting a run on one of the engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedlgm.errors import ConfigError, RunError
from fedlgm.files import path_of
from fedlgm.training.devices import plain_defaults
from fedlgm.wording import prefix_key
from simulations import engines
from simulations.config.assembly import Assembly
from simulations.config.decided import resolve_auto, resolve_hardware
from simulations.config.own import Own
from simulations.config.recipe import Recipe
from simulations.engines import Engine, EngineOptions
from simulations.runs import new_folder
from simulations.runs.folder import RunFolder
from simulations.runs.rows import OnRound, RunSummary
from simulations.runs.trackers import Tracker, Trackers


@plain_defaults()
def simulate(
    recipe: Recipe,
    *,
    engine: str | Engine = "local",
    run_dir: Path | str | None = None,
    workers: int | None = None,
    ray_address: str | None = None,
    supernodes: int | None = None,
    progress: OnRound | None = None,
    on_folder: Callable[[Path], None] | None = None,
    own: Own | None = None,
    trackers: Sequence[str | Tracker] | None = None,
) -> RunSummary:
    """Simulate a federation in a new run folder and return its summary (see `server.serve`).

    A run that ends with an error before its first round is charged leaves no folder.

    `simulations.simulate` does the same from Python, and its docstring has an example.

    Args:
        recipe: recipe of the run.
        engine: "local" (this process), "processes" (forked from it), "ray" (resident actors),
            "flower" (Flower's simulation runtime), "auto" (the best one for the machine), another
            name or reference (`simulations.engines`), or an `Engine`.
        run_dir: folder to create; by default `runs/<recipe>-<time>`.
        workers: processes that train; by default the machine's cores.
        ray_address: for "ray", a cluster to join instead of this machine.
        supernodes: for "flower", simulated SuperNodes. By default there is one per worker, which
            serves whole blocks. If there are as many SuperNodes as clients, every client is a
            separate node, as in a deployment.
        progress: called with each round's metrics row.
        on_folder: called with the run folder as soon as it exists.
        own: users' objects that replace names in the recipe.
        trackers: trackers that follow the run, by name or as objects (`simulations.runs.trackers`),
            instead of the recipe's.

    Raises:
        ConfigError, DataError, PrivacyError, RunError: a setting cannot be used; one message says
            why, if possible before anything is written.
    """
    recipe, given = resolve_hardware(recipe), trackers or ()
    if isinstance(trackers, str):
        raise ConfigError(
            f"trackers must be a list of names and objects, got the string {trackers!r}"
        )
    if trackers is not None:
        names = [tracker for tracker in given if isinstance(tracker, str)]
        recipe = recipe.with_values(run={"trackers": names})
    objects = [tracker for tracker in given if not isinstance(tracker, str)]
    chosen = _engine(engine, EngineOptions(workers, ray_address, supernodes), recipe, objects)
    if run_dir is not None:
        run_dir = path_of("run_dir", run_dir)
        new_folder.refuse_existing(run_dir)
    assembly = Assembly(recipe, own)
    with chosen.start(assembly):
        assembly.check()
        chosen.wait()
        assembly = resolve_auto(assembly, chosen.workers(recipe))
        folder = new_folder.create(run_dir, assembly.recipe)
        if on_folder is not None:
            on_folder(folder.path)
        try:
            with new_folder.removed_if_refused(folder):
                return chosen.serve(assembly, folder, progress, objects)
        except KeyboardInterrupt as stop:
            again = "".join(f", {name}=..." for name in assembly.own.object_names())
            stop.add_note(f"continue the run with simulations.resume({str(folder.path)!r}{again})")
            raise


@plain_defaults()
def resume(
    run: Path | str | RunFolder,
    *,
    engine: str | Engine = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    supernodes: int | None = None,
    progress: OnRound | None = None,
    own: Own | None = None,
    trackers: Sequence[Tracker] = (),
) -> RunSummary:
    """Continue an interrupted run. It ends with the same model as an uninterrupted run.

    The trackers named in its recipe continue; `trackers` are additional objects. A finished run
    returns its summary, after the same checks of its ledger, recipe and objects. Arguments as in
    `simulate`; `simulations.resume` has an example.

    Raises:
        ConfigError, DataError, PrivacyError, RunError: the run cannot be continued; one message
            says why.
    """
    folder = run if isinstance(run, RunFolder) else RunFolder.open(run)
    recipe, summary = folder.recipe(), folder.final_summary()
    folder.provenance.check_named(own.object_names() if own else ())
    if summary is not None:
        if own and own.object_names():
            folder.provenance.check_objects(Assembly(recipe, own).fingerprints())
        return summary
    folder.verify()
    try:
        recipe = resolve_hardware(recipe)
    except ConfigError as error:
        raise RunError(
            f"{folder.path} can be resumed only where it can draw the same noise: {error}"
        ) from error
    chosen = _engine(engine, EngineOptions(workers, ray_address, supernodes), recipe, trackers)
    assembly = Assembly(recipe, own)
    with chosen.start(assembly), folder.writing():
        assembly.check()
        chosen.wait()
        return chosen.serve(assembly, folder, progress, trackers)


def _engine(
    engine: str | Engine, options: EngineOptions, recipe: Recipe, trackers: Sequence[Tracker]
) -> Engine:
    """The engine of a run. It must be able to serve these tracker objects and the recipe's
    trackers.
    """
    device, threads = recipe.training.device, recipe.run.threads
    chosen = engines.get(engine, options, device=device, threads=threads)
    with prefix_key("run.trackers"):
        Trackers(recipe.run.trackers, trackers)
    if trackers and not chosen.in_process:
        raise ConfigError(
            f"with engine {chosen.name!r} the server is another process, which a tracker object "
            "cannot reach: name it as 'package.module:name'"
        )
    return chosen
