"""A node's executor, which passes tasks from its SuperNode to its release service.

The executor replaces `flower-superexec` for a SuperNode that is started with `--isolation process`.
The app that a run's submitter has uploaded is neither installed nor imported on the node, and no
process is started for a message.

The executor works only with the versions of Flower that `clients.flower_private` names, and refuses
others.

    python -m fedlgm_nodes.service.executor --supernode 127.0.0.1:9420 --secret-file secret --socket
    run/release.sock
"""

from __future__ import annotations

import argparse
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clients.flower_private import RuntimeConnection, failed_reply, version_problem
from fedlgm.errors import FedlgmError, RunError
from fedlgm.files import explain_failure
from fedlgm_nodes.protocol.messages import pause_after
from fedlgm_nodes.service.ending import on_order_to_stop

_HEARTBEAT_S = 20.0
_TASKS = 4
# seconds between checks for the order to stop, while the largest number of tasks is running
_LOOK_UP_S = 0.5
_log = logging.getLogger("fedlgm.executor")


class Executor:
    """Takes tasks from a SuperNode on this machine, several at once, because one task may wait for
    a message forever.

    Args:
        supernode: host:port of the SuperNode's Runtime API.
        secret: the secret shared with the SuperNode (`--superexec-auth-secret-file`).
        socket: socket of the release service.
        poll: seconds between polls for a task; up to five times as long if the last task was long
            ago, since every poll costs both processes a few milliseconds.
    """

    def __init__(self, supernode: str, secret: bytes, socket: Path, poll: float = 0.2) -> None:
        self._supernode, self._socket, self._poll = supernode, socket, poll
        self._free, self._reachable = threading.Semaphore(_TASKS), True
        self._client = RuntimeConnection.claiming(supernode, secret)

    def run(self, stop: threading.Event) -> None:
        """Take tasks until `stop` is set.

        Raises:
            RunError: the SuperNode rejects the secret.
        """
        last = time.monotonic()
        while not stop.is_set():
            # Wait until another task can be worked on before a task is claimed, because a claimed
            # task that waits is lost after half a minute.
            if not self._free.acquire(timeout=_LOOK_UP_S):
                continue
            answer = None
            try:
                answer = self._claim(stop)
            finally:
                if answer is None:
                    self._free.release()
            if answer is None:
                stop.wait(pause_after(time.monotonic() - last, self._poll, 5 * self._poll))
                continue
            last = time.monotonic()
            threading.Thread(target=self._take, args=answer, daemon=True).start()

    def _claim(self, stop: threading.Event) -> tuple[str, int] | None:
        """Claim a task and return its token and number; None if there is no task, or if the
        SuperNode does not answer.
        """
        import httpx

        try:
            answer = self._client.claim()
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (401, 403):
                raise RunError(
                    f"the SuperNode at {self._supernode} does not accept the secret: both must "
                    "read the same bytes, including a newline at the end"
                ) from error
            _log.warning("the SuperNode at %s: %s", self._supernode, error)
            stop.wait(1.0)
            return None
        except httpx.HTTPError as error:
            if self._reachable:
                _log.warning(
                    "the SuperNode at %s cannot be reached: start it again if it has ended (%s)",
                    self._supernode,
                    error,
                )
            self._reachable = False
            stop.wait(1.0)
            return None
        if not self._reachable:
            _log.info("the SuperNode at %s answers again", self._supernode)
        self._reachable = True
        return answer

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def _take(self, token: str, task: int) -> None:
        started = time.monotonic()
        try:
            self._work(token)
            _log.info("task %d done in %.2f s", task, time.monotonic() - started)
        except Exception:  # one message must not end the executor
            _log.exception("task %d failed", task)
        finally:
            self._free.release()

    def _work(self, token: str) -> None:
        from flwr.app import Message

        from fedlgm_nodes.service.relay import forward

        connection = RuntimeConnection.working(self._supernode, token)
        context, failure = None, "the task could not be read"
        try:
            with _heartbeat(connection):
                message, context = connection.pull()
                try:
                    reply = Message(forward(message.content, self._socket), reply_to=message)
                    failure = ""
                except Exception as error:
                    _log.warning("%s", error)
                    failure = (
                        str(error)
                        if isinstance(error, FedlgmError)
                        else f"{type(error).__name__}: {error}"
                    )
                    reply = failed_reply(message, failure)
                connection.push(reply, context)
        finally:
            connection.end(context, failure)
            connection.close()


@contextmanager
def _heartbeat(connection: RuntimeConnection) -> Iterator[None]:
    """Send the SuperNode regular heartbeats for a task while the block runs."""
    import httpx

    done = threading.Event()

    def beat() -> None:
        while not done.wait(_HEARTBEAT_S):
            try:
                connection.beat()
            except httpx.HTTPError as error:
                _log.warning("heartbeat: %s", error)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="fedlgm_nodes.service.executor", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--supernode", required=True, help="host:port of the SuperNode's Runtime API"
    )
    parser.add_argument(
        "--secret-file", required=True, type=Path, help="secret shared with the SuperNode"
    )
    parser.add_argument(
        "--socket", required=True, type=Path, help="socket of the node's release service"
    )
    parser.add_argument("--poll", type=float, default=0.2, help="seconds between polls for a task")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if why := version_problem("install that one"):
        return _refuse(why)
    try:
        secret = options.secret_file.read_bytes()
    except OSError as error:
        return _refuse(explain_failure("the secret cannot be read", error))
    if not secret:
        return _refuse(f"the secret {options.secret_file} is empty")
    stop = threading.Event()
    on_order_to_stop(stop.set)
    executor = Executor(options.supernode, secret, options.socket, options.poll)
    try:
        executor.run(stop)
    except RunError as error:
        return _refuse(str(error))
    finally:
        executor.close()
    return 0


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
