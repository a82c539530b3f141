"""What a log of Flower's says of the end of a run."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from fedlgm.errors import DivergedError
from simulations.config import recipe as recipes
from simulations.engines import flower
from simulations.engines.flower_command import first_exception, reason, tail
from simulations.runs import new_folder
from simulations.runs.folder import RunFolder

CLUSTER = """\
\x1b[92mINFO \x1b[0m:      Starting Flower ServerApp
\x1b[91mERROR \x1b[0m:     An exception occured!! num_cpus must not be provided.
\x1b[91mERROR \x1b[0m:     Traceback (most recent call last):
  File "/flwr/server/superlink/fleet/vce/vce_api.py", line 219, in run_api
    backend = backend_fn()
              ^^^^^^^^^^^^
  File "/ray/_private/worker.py", line 1921, in init
    raise ValueError(
ValueError: When connecting to an existing cluster, num_cpus and num_gpus must not be provided.

\x1b[93mWARNING \x1b[0m:   Stopping Simulation Runtime.
\x1b[91mERROR \x1b[0m:     Traceback (most recent call last):
  File "/ray/_private/worker.py", line 1921, in init
    raise ValueError(
ValueError: When connecting to an existing cluster, num_cpus and num_gpus must not be provided.

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/flwr/simulation/run_simulation.py", line 347, in _main_loop
    raise RuntimeError("An error was encountered. Ending simulation.") from ex
RuntimeError: An error was encountered. Ending simulation.
\x1b[91mERROR \x1b[0m:     Exit Code: 700
"""
CLIENT = """\
\x1b[91mERROR \x1b[0m:     Traceback (most recent call last):
  File "/flwr/server/superlink/fleet/vce/vce_api.py", line 122, in worker
    out_mssg, updated_context = backend.process_message(message, context)
  File "/ray/_private/worker.py", line 1014, in get_objects
    raise value.as_instanceof_cause()
ray.exceptions.RayTaskError(ClientAppException): \x1b[36mray::ClientAppActor.run()\x1b[39m (pid=7, ip=10.0.0.2)
  File "/flwr/simulation/ray_transport/ray_actor.py", line 60, in run
    out_message = app(message=message, context=context)
  File "/home/me/model.py", line 12, in forward
    return self.layers(x)
MemoryError: the client ran out of memory
in its second layer

The above exception was the direct cause of the following exception:

\x1b[36mray::ClientAppActor.run()\x1b[39m (pid=7, ip=10.0.0.2)
  File "/flwr/simulation/ray_transport/ray_actor.py", line 66, in run
    raise ClientAppException(str(ex)) from ex
flwr.clientapp.client_app.ClientAppException:
Exception ClientAppException occurred. Message: the client ran out of memory
"""


@pytest.mark.parametrize(
    ("log", "said", "place"),
    [
        (
            CLUSTER,
            (
                "ValueError: When connecting to an existing cluster, num_cpus and num_gpus must "
                "not be provided."
            ),
            'File "/ray/_private/worker.py", line 1921, in init',
        ),
        (
            CLIENT,
            "MemoryError: the client ran out of memory\nin its second layer",
            'File "/home/me/model.py", line 12, in forward',
        ),
    ],
    ids=["runtime", "client"],
)
def test_the_first_exception_is_told_and_the_line_that_raised_it(log, said, place):
    assert first_exception(log) == f"{said}\n  {place}"
    assert reason(log) == f"{said}\n  {place}\nEnd of its log:\n{tail(log)}"
    assert "\x1b" not in reason(log)


def test_without_an_exception_there_is_the_end_of_the_log():
    log = "".join(f"\x1b[92mINFO \x1b[0m:      round {i}\n" for i in range(40))
    assert first_exception(log) is None
    told = reason(log).splitlines()
    assert told[0] == "End of its log:"
    assert told[1:] == [f"INFO :      round {i}" for i in range(25, 40)]


@pytest.mark.parametrize("ended", ["Finished task 5 of run 7", "Failed to finish task 5 of run 7"])
def test_flower_is_asked_once_its_log_shows_that_a_task_has_ended(ended, tmp_path, monkeypatch):
    """A question takes a second of a core, and real nodes fill the log with their requests."""
    log = tmp_path / "superlink.log"
    lines = iter([*("POST /v1/runtime/pull-messages HTTP/1.1" for _ in range(30)), ended])
    log.touch()

    def write(_seconds: float) -> None:
        with log.open("a") as file:
            file.write(f"{next(lines)}\n")

    class Flwr:
        def status(self, run_id: str) -> str:
            asked.append(log.read_text().count("\n"))
            return "finished:completed"

    asked: list[int] = []
    monkeypatch.setattr(flower.time, "sleep", write)
    assert flower.follow(Flwr(), "7", log) == "finished:completed"
    assert asked == [31]


def test_flower_is_not_asked_about_a_run_that_is_complete(tmp_path, monkeypatch):
    """It would say so seconds later, once it has ended Ray and passed on its logs."""
    log, looks = tmp_path / "superlink.log", iter([False, False, True])
    log.touch()
    monkeypatch.setattr(flower.time, "sleep", lambda _: None)
    assert flower.follow(None, "7", log, lambda: next(looks)) == "finished:completed"


def test_a_run_is_complete_once_its_server_has_let_go_of_it(tmp_path, monkeypatch):
    """Its trackers end after its result is written; an earlier divergence ends no resumed run."""
    folder = new_folder.create(tmp_path / "run", recipes.load("digits"))
    folder.diverged.write(DivergedError("training diverged in round 3"))

    class Flwr:
        def submit(self, *arguments: str) -> str:
            return "7"

    def follow(flwr, run_id, log, has_ended) -> str:
        seen.append(has_ended())
        with folder.lock():
            folder.result_file.write_text("{}")
            seen.append(has_ended())
        seen.append(has_ended())
        raise KeyboardInterrupt

    seen: list[bool] = []
    monkeypatch.setattr(flower, "private_superlink", lambda log: nullcontext(Flwr()))
    monkeypatch.setattr(flower, "follow", follow)
    with pytest.raises(KeyboardInterrupt):
        flower.run_flower(RunFolder.open(folder.path), 1, 1)
    assert seen == [False, False, True]
