"""The `flower` engine, which runs Flower's simulation runtime behind a private SuperLink and stops
it at the end.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typing_extensions import override

from fedlgm.errors import RunError
from fedlgm.extension.registration import registrations
from fedlgm.files import write_durably
from simulations.config.assembly import Assembly
from simulations.config.own import Own
from simulations.engines.base import Engine, EngineOptions, require_ray
from simulations.engines.flower_command import COMPLETED, FlwrCommand, config_file, reason
from simulations.engines.superlink import private_superlink
from simulations.runs.folder import RunFolder
from simulations.runs.rows import OnRound, RunSummary
from simulations.runs.trackers import Tracker

APP = Path(__file__).resolve().parents[1] / "flower_app"
# seconds without a line about tasks in the log, after which the SuperLink is asked
_SILENCE_S = 60.0
_TASK_ENDED = re.compile(rb"(?:Finished|Failed to finish) task")


class FlowerEngine(Engine):
    """Flower's simulation runtime, whose server is another process.

    Args:
        options: workers and simulated SuperNodes (by default one per worker).

    Raises:
        ConfigError: Ray, which the runtime needs, is not installed, or an option belongs to another
            engine.

    Example:
        >>> FlowerEngine(EngineOptions(ray_address="auto"))
        Traceback (most recent call last):
            ...
        fedlgm.errors.ConfigError: a Ray address is for engine 'ray', not 'flower'
    """

    name = "flower"
    in_process = False
    refuses = ("ray_address",)

    def __init__(self, options: EngineOptions | None = None) -> None:
        super().__init__(options)
        require_ray(self.name)

    @override
    def serve(
        self,
        assembly: Assembly,
        folder: RunFolder,
        progress: OnRound | None,
        trackers: Sequence[Tracker],
    ) -> RunSummary:
        import torch

        from simulations.engines.ray import gpu_share

        workers = self.workers(assembly.recipe)
        share = gpu_share(assembly.model.device, workers, torch.cuda.device_count())
        supernodes = self.options.supernodes or workers
        return run_flower(folder, supernodes, workers, progress, assembly.own, share)


def run_flower(
    folder: RunFolder,
    supernodes: int,
    workers: int,
    progress: OnRound | None = None,
    own: Own | None = None,
    gpus: float = 0.0,
) -> RunSummary:
    """Run the Flower app on `folder`'s recipe and return its summary.

    Args:
        folder: a created run folder.
        supernodes: simulated SuperNodes, one per client or fewer that serve blocks.
        workers: Ray actors of one CPU each.
        progress: called with each round's metrics row.
        own: users' objects, passed to Flower's processes in a private file that is deleted at the
            end.
        gpus: GPU share of an actor.

    Raises:
        DivergedError: a round's model is NaN or infinite.
        RunError: the run did not complete; the message has the first exception in Flower's log, and
            the end of the log.
    """
    log = folder.private_file("flower.log")  # the log says how many clients took part
    with private_superlink(log) as flwr, _handed_over(folder.private, own) as objects:
        federation = (
            f"num-supernodes={supernodes} client-resources-num-cpus=1 "
            f"client-resources-num-gpus={gpus} init-args-num-cpus={workers} "
            "init-args-log-to-driver=false"
        )
        config = _run_config(folder, supernodes, objects)
        folder.keys(folder.recipe().run.seed)
        file = config_file(folder.private / "flower.toml", config)
        folder.diverged.forget()  # otherwise a resumed run would seem to have ended
        run_id = flwr.submit(APP, "--federation-config", federation, "--run-config", file)
        seen = len(folder.rows())

        def pass_on() -> bool:
            """Pass on new rows. Returns whether the ServerApp has completed the run, or seen it
            diverge.
            """
            nonlocal seen
            rows = folder.rows(private=True)
            for row in rows[seen:]:
                if progress is not None:
                    progress(row)
            seen = len(rows)
            ended = folder.result_file.is_file() or folder.diverged.read() is not None
            return ended and folder.worker() is None

        status = follow(flwr, run_id, log, pass_on)
        result = require_summary(
            folder,
            status,
            lambda: f"Flower reports {status} for the run. {reason(flwr.log(run_id))}",
        )
        result.update(folder.audit_summary())
        return result


def require_summary(folder: RunFolder, status: str, why: Callable[[], str]) -> RunSummary:
    """The summary of a run that has ended according to Flower.

    Args:
        folder: the run's folder.
        status: Flower's status of the run.
        why: function that says why the run did not complete.

    Raises:
        DivergedError: a round's model is NaN or infinite.
        RunError: the run did not complete.
    """
    result = folder.result()
    if status == COMPLETED and result is not None:
        return result
    raise folder.diverged.read() or RunError(why())


def _run_config(folder: RunFolder, supernodes: int, objects: Path | None) -> dict[str, str | bool]:
    path, recipe = str(folder.path.resolve()), folder.recipe()
    config: dict[str, str | bool] = {
        "recipe": str(folder.recipe_file.resolve()),
        "run-dir": path,
        "nodes": "clients" if supernodes == recipe.federation.clients else "workers",
        "simulated": True,
    }
    if recipe.run.seed is None:
        config["keys"] = (
            # otherwise server and clients would have different keys, and the run would not be
            # repeatable
            path
        )
    if objects:
        config["objects"] = str(objects)
    return config


def follow(
    flwr: FlwrCommand, run_id: str, log: Path, look: Callable[[], bool] = lambda: False
) -> str:
    """Wait until a run ends and return its status: Flower's status, or `COMPLETED` once `look` has
    seen the run complete.

    Args:
        flwr: the SuperLink.
        run_id: the run.
        log: the SuperLink's log, which shows a task's end first; a status query takes seconds of a
            core.
        look: called four times a second; returns True if the run is complete, which Flower says
            seconds later.
    """
    asked, status = time.monotonic(), "pending"
    with log.open("rb") as file:
        while not status.startswith("finished"):
            time.sleep(0.25)
            if look():
                return COMPLETED
            if _TASK_ENDED.search(file.read()) or time.monotonic() - asked > _SILENCE_S:
                status, asked = flwr.status(run_id), time.monotonic()
    look()
    return status


@contextmanager
def _handed_over(private: Path, objects: Any) -> Iterator[Path | None]:
    """Private file of Python objects for processes that Flower starts on this machine; None without
    objects.
    """
    if not objects and not registrations():
        yield None
        return
    import cloudpickle

    path = private.resolve() / "objects.pkl"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_durably(path, cloudpickle.dumps(objects))
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
