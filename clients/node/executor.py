"""A node's own executor: takes the SuperNode's tasks and hands them to the release service, without running any app.

Replaces `flower-superexec` beside a SuperNode started with `--isolation process`. The app that a run's submitter has
uploaded is neither installed nor imported on the node, and no process is started per message.

Uses private modules of Flower; they may change with any version, so any other than `clients.flower_private` names is
refused.

    python -m clients.node.executor --supernode 127.0.0.1:9420 --secret-file secret --socket run/release.sock
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clients.flower_private import unsupported
from fedlgm.node_protocol import pause_after

_HEARTBEAT_S = 20.0
_PULL_S = 120.0
_TASKS = 4
_LOOK_UP_S = 0.5  # from work that fills all places, for the order to stop
_log = logging.getLogger("fedlgm.executor")


class Executor:
    """Takes tasks from a SuperNode on this machine, a few at a time: one may wait for a message that never comes whole.

    Args:
        supernode: host:port of its Runtime API.
        secret: shared with it (`--superexec-auth-secret-file`), byte for byte.
        socket: of the release service.
        poll: seconds between looks for a task; up to five times as long when the last one was long ago, since every
            look costs both processes some milliseconds.
    """

    def __init__(self, supernode: str, secret: bytes, socket: Path, poll: float = 0.2) -> None:
        from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor

        signed = SuperExecAuthHttpInterceptor(
            master_secret=secret, protected_methods={"/flwr.proto.Runtime/AcquireTask"}
        )
        self._supernode, self._socket, self._poll = supernode, socket, poll
        self._free, self._reachable = threading.Semaphore(_TASKS), True
        self._client = self._connect("SuperExec", signed)

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set.

        Raises:
            PermissionError: the SuperNode does not know the secret.
        """
        last = time.monotonic()
        while not stop.is_set():
            # A place before a task: one that is claimed and waits is lost after half a minute.
            if not self._free.acquire(timeout=_LOOK_UP_S):
                continue
            answer = None
            try:
                answer = self._claimed(stop)
            finally:
                if answer is None:
                    self._free.release()
            if answer is None:
                stop.wait(pause_after(time.monotonic() - last, self._poll, 5 * self._poll))
                continue
            last = time.monotonic()
            threading.Thread(target=self._take, args=(answer.token, answer.task.task_id), daemon=True).start()

    def _claimed(self, stop: threading.Event) -> Any:
        """The SuperNode's answer with a task that is ours now; None if there is none, or nobody answers."""
        import httpx
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.constant import TaskType

        try:
            answer = self._client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (401, 403):
                raise PermissionError(
                    f"the SuperNode at {self._supernode} does not accept the secret: both must read the same "
                    "bytes, a newline at the end included"
                ) from error
            _log.warning("the SuperNode at %s: %s", self._supernode, error)
            stop.wait(1.0)
            return None
        except httpx.HTTPError as error:
            if self._reachable:
                _log.warning("the SuperNode at %s cannot be reached: %s", self._supernode, error)
            self._reachable = False
            stop.wait(1.0)
            return None
        if not self._reachable:
            _log.info("the SuperNode at %s answers again", self._supernode)
        self._reachable = True
        return answer if answer.token else None

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
        from flwr.app import Error, Message
        from flwr.common.constant import ErrorCode, SubStatus
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
        from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

        from clients.node.relay import forward

        client = self._connect("flwr-clientapp", RuntimeTokenHttpInterceptor(token))
        context, status, details = None, SubStatus.FAILED, "the task could not be read"
        try:
            with _heartbeat(client):
                message, context = _pull(client)
                try:
                    reply = Message(forward(message.content, self._socket), reply_to=message)
                    status, details = SubStatus.COMPLETED, ""
                except Exception as error:
                    _log.warning("%s", error)
                    details = f"{type(error).__name__}: {error}"
                    reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, details), reply_to=message)
                push_message(client, reply, context)
        finally:
            push_task_output(client=client, context=context, sub_status=status, details=details)
            client.close()

    def _connect(self, component: str, *interceptors: Any) -> Any:
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supercore.runtime import RuntimeHttpClient

        return RuntimeHttpClient.from_server_address(
            server_address=self._supernode,
            insecure=True,  # the SuperNode is on this machine
            root_certificates=None,
            interceptors=[RuntimeVersionHttpInterceptor(component_name=component), *interceptors],
            retry_invoker=None,
        )


def _pull(client: Any) -> tuple[Any, Any]:
    """Message and context of a task. The app that comes with them is left where it is.

    As `flwr.supernode.runtime.run_clientapp.pull_task_input`, but it gives up on a message that never comes whole.
    """
    from flwr.app import Message
    from flwr.common.serde import context_from_proto
    from flwr.proto.node_pb2 import Node
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullTaskInputRequest
    from flwr.supercore.inflatable.inflatable_protobuf_utils import (
        make_confirm_message_received_fn_protobuf,
        make_pull_object_fn_protobuf,
    )
    from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
    from flwr.supercore.task_identity import TaskIdentity

    given = client.PullTaskInput(PullTaskInputRequest())
    TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
    TaskIdentity.node_id = given.context.node_id
    context = context_from_proto(given.context)
    deadline = time.monotonic() + _PULL_S
    while not (pulled := client.PullMessages(PullAppMessagesRequest())).messages_list:
        if time.monotonic() > deadline:  # a task is there a moment before its message
            raise TimeoutError("the SuperNode has a task without a message")
        time.sleep(0.1)
    tree, node = pulled.message_object_trees[0], Node(node_id=context.node_id)
    message = pull_and_inflate_object_from_tree(
        tree,
        make_pull_object_fn_protobuf(client.PullObject, node, context.run_id),
        make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, context.run_id),
        return_type=Message,
        max_time=_PULL_S,
        initial_backoff=0.05,  # the first of a message's parts are there a moment after it
    )
    message.metadata.__dict__["_message_id"] = tree.object_id  # its own content does not hold it
    return message, context


@contextmanager
def _heartbeat(client: Any) -> Iterator[None]:
    """Tell the SuperNode now and then that its task is being worked on."""
    import httpx
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

    done = threading.Event()

    def beat() -> None:
        while not done.wait(_HEARTBEAT_S):
            try:
                client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
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
    parser = argparse.ArgumentParser(prog="clients.node.executor", description=__doc__.splitlines()[0])
    parser.add_argument("--supernode", required=True, help="host:port of the SuperNode's Runtime API")
    parser.add_argument("--secret-file", required=True, type=Path, help="secret shared with the SuperNode")
    parser.add_argument("--socket", required=True, type=Path, help="socket of the node's release service")
    parser.add_argument("--poll", type=float, default=0.2, help="least seconds between looks for a task")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if why := unsupported("install that one"):
        return _refuse(why)
    try:
        secret = options.secret_file.read_bytes()
    except OSError as error:
        return _refuse(f"the secret cannot be read: {error}")
    if not secret:
        return _refuse(f"the secret {options.secret_file} is empty")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    executor = Executor(options.supernode, secret, options.socket, options.poll)
    try:
        executor.run(stop)
    except PermissionError as error:
        return _refuse(str(error))
    finally:
        executor.close()
    return 0


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
