"""Starting a run on one of the engines."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from clients import AnyClient
from fedlgm.errors import ConfigError, RunError, prefix_key
from simulations.config.assembly import Assembly, settled
from simulations.config.own import Own
from simulations.config.recipe import Recipe
from simulations.runs.folder import RunFolder
from simulations.runs.rows import OnRound, RunSummary
from simulations.runs.trackers import Tracker, Trackers

if TYPE_CHECKING:
    from simulations.engines.ray import RayGrid

Engine = Literal["local", "ray", "flower"]


def simulate(
    recipe: Recipe,
    *,
    engine: Engine = "local",
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

    `simulations.simulate` is the same for Python: its docstring has an example.

    Args:
        recipe: what to run.
        engine: "local" (this process), "ray" (resident actors) or "flower" (Flower's simulation runtime).
        run_dir: folder to create; by default `runs/<recipe>-<time>`.
        workers: processes that train; by default the machine's cores.
        ray_address: for "ray", a cluster to join instead of this machine.
        supernodes: for "flower", simulated SuperNodes: by default one per worker, each serving whole blocks; with as
            many as there are clients every client is a node of its own, as in a deployment.
        progress: called with each round's metrics row.
        on_folder: called with the run folder as soon as it exists.
        own: objects of a user's own that stand for names in the recipe.
        trackers: followers of the run, by name or as objects (`simulations.runs.trackers`), instead of the recipe's.

    Raises:
        ConfigError, DataError, PrivacyError, RunError: one clear message, if possible before anything is written.
    """
    _check_options(engine, workers, ray_address, supernodes)
    if run_dir is not None:
        RunFolder.refuse_existing(Path(run_dir))
    recipe, objects = _tracked(settled(recipe), trackers, engine)
    assembly, workers = Assembly(recipe, own or Own()), _workers(recipe, workers)
    with prepared(assembly, engine, workers, ray_address) as actors:
        if "auto" in (recipe.training.vectorize, recipe.training.compile):
            # Settled once and written into the run: the trainers differ in the last bits.
            recipe = recipe.model_copy(update={"training": assembly.faster_training(workers)})
            assembly = Assembly(recipe, assembly.own).with_data(assembly.dataset, assembly.partition)
        folder = RunFolder.create(Path(run_dir), recipe) if run_dir is not None else _fresh_folder(recipe)
        if on_folder is not None:
            on_folder(folder.path)
        return _run(assembly, folder, engine, actors, supernodes, workers, progress, objects)


def resume(
    run: Path | str,
    *,
    engine: Engine = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    supernodes: int | None = None,
    progress: OnRound | None = None,
    own: Own | None = None,
    trackers: Sequence[Tracker] = (),
) -> RunSummary:
    """Continue an interrupted run to the model that an uninterrupted one would have reached.

    The trackers that its recipe names go on; `trackers` are objects that follow it besides. A run that is finished
    gives its summary, after the same checks of its ledger, recipe and objects. Arguments as for `simulate`; for an
    example see `simulations.resume`.

    Raises:
        ConfigError, DataError, PrivacyError, RunError: with one clear message.
    """
    _check_options(engine, workers, ray_address, supernodes)
    folder = RunFolder.open(Path(run))
    finished = folder.result()
    folder.verify()
    folder.provenance.check_named(own.given() if own else ())
    if finished is not None:
        folder.forget_noise()
        if own:
            given = Assembly(folder.recipe(), own)
            folder.provenance.check_objects(own.fingerprints(given.module(), given.partition))
        return finished
    try:
        assembly = Assembly(settled(folder.recipe()), own or Own())
    except ConfigError as error:
        raise RunError(f"{run} can only be resumed where it can draw the same noise: {error}") from error
    _check_trackers(assembly.recipe, trackers, engine)
    workers = _workers(assembly.recipe, workers)
    with prepared(assembly, engine, workers, ray_address) as actors:
        return _run(assembly, folder, engine, actors, supernodes, workers, progress, trackers)


@contextmanager
def prepared(
    assembly: Assembly, engine: Engine, workers: int, ray_address: str | None = None
) -> Iterator[RayGrid | None]:
    """Refuse what cannot run; within the context engine `ray` has its actors, which start meanwhile.

    `simulate` and `resume` run in it.
    """
    if engine != "ray":
        assembly.check()
        yield None
        return
    from simulations.engines import cluster
    from simulations.engines.ray import RayGrid, gpu_share

    def start_actors() -> RayGrid:
        return RayGrid(workers, gpu_share(assembly.device, workers))

    with cluster.session(ray_address, workers, start_actors, leave=RayGrid.close) as ready:
        if ray_address is not None:
            ready()  # joining is quick, so report a wrong address now
        assembly.check()
        yield ready()


def check_engine(engine: str) -> None:
    """Refuse an engine that is not there.

    Raises:
        ConfigError: with those that are.

    Example:
        >>> check_engine("locl")
        Traceback (most recent call last):
            ...
        fedlgm.errors.ConfigError: unknown engine 'locl'; known: local, ray, flower
    """
    if engine not in get_args(Engine):
        raise ConfigError(f"unknown engine {engine!r}; known: {', '.join(get_args(Engine))}")


def _check_options(engine: str, workers: int | None, ray_address: str | None, supernodes: int | None) -> None:
    for name, number in (("workers", workers), ("supernodes", supernodes)):
        if number is not None and number < 1:
            raise ConfigError(f"{name} must be at least 1, got {number}")
    check_engine(engine)
    if engine != "local" and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            f"engine {engine!r} needs the package ray, which is not installed: pip install 'fedlgm[ray]', or use "
            "engine 'local'"
        )
    if ray_address is not None and engine != "ray":
        raise ConfigError(f"a Ray address is for engine 'ray', not {engine!r}")
    if supernodes is not None and engine != "flower":
        raise ConfigError(f"a number of SuperNodes is for engine 'flower', not {engine!r}")


def _tracked(recipe: Recipe, trackers: Sequence[str | Tracker] | None, engine: str) -> tuple[Recipe, list[Tracker]]:
    """The recipe with the trackers given by name, and those given as objects; refuses what cannot follow the run."""
    if isinstance(trackers, str):
        raise ConfigError(f"trackers are a list of names and objects, got the text {trackers!r}")
    given = list(trackers or ())
    objects = [tracker for tracker in given if not isinstance(tracker, str)]
    if trackers is not None:
        names = [tracker for tracker in given if isinstance(tracker, str)]
        recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"trackers": names})})
    _check_trackers(recipe, objects, engine)
    return recipe, objects


def _check_trackers(recipe: Recipe, objects: Sequence[Tracker], engine: str) -> None:
    with prefix_key("run.trackers"):
        Trackers.of(recipe.run.trackers, objects)
    if objects and engine == "flower":
        raise ConfigError(
            "with engine 'flower' the server is another process, which a tracker object does not reach: name it as "
            "'package.module:name'"
        )


def _workers(recipe: Recipe, workers: int | None) -> int:
    return workers or recipe.run.workers or os.cpu_count() or 1


def _run(
    assembly: Assembly,
    folder: RunFolder,
    engine: Engine,
    actors: RayGrid | None,
    supernodes: int | None,
    workers: int,
    progress: OnRound | None,
    trackers: Sequence[Tracker],
) -> RunSummary:
    from simulations.runs.server import serve

    if engine == "local":
        from simulations.engines.local import LocalGrid

        keys, _ = folder.keys(assembly.recipe.run.seed)
        grid = LocalGrid(assembly.client(keys, AnyClient()).as_app())
        return serve(grid, assembly, folder, engine, progress, trackers=trackers)
    if actors is not None:
        keys, _ = folder.keys(assembly.recipe.run.seed)
        return serve(actors.serving(assembly, keys), assembly, folder, engine, progress, trackers=trackers)
    from simulations.engines.flower import run_flower

    return run_flower(folder, supernodes or workers, workers, progress, assembly.own)


def _fresh_folder(recipe: Recipe) -> RunFolder:
    """A new folder of the default name; another process may take the same name in the same second."""
    while True:
        path = default_folder(recipe)
        try:
            return RunFolder.create(path, recipe)
        except RunError:
            if not path.exists():
                raise


def default_folder(recipe: Recipe) -> Path:
    """A folder under `runs` that does not exist yet.

    Example:
        >>> from simulations.config.recipe import load
        >>> default_folder(load("digits")).name.startswith("digits-")
        True
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = Path("runs") / f"{recipe.name}-{stamp}"
    number = 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{recipe.name}-{stamp}-{number}"
    return path
