"""The only module that uses Flower's private modules, which may change with any version.

A process imports them when it calls these functions. Flower's public modules (`flwr.app`,
`flwr.serverapp`, `flwr.clientapp`) are used wherever they are needed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

from fedlgm.cache import version_of
from fedlgm.importing import importing

if TYPE_CHECKING:
    from flwr.app import Context, Message

FLOWER = ("1.41", "1.42", "1.43")
"""Versions of Flower with which this module is tested."""
SOON_S = 0.1
HEARTBEAT_S = 15
"""Largest time between a SuperNode's heartbeats; after twice this time, the SuperLink considers it
gone."""
_PULL_S = 120.0


def version_problem(instead: str) -> str:
    """Return the reason why the installed Flower cannot be used; empty if it can.

    Args:
        instead: the remedy, as the end of a sentence.
    """
    installed = version_of("flwr")
    if installed.startswith(tuple(f"{number}." for number in FLOWER)):
        return ""
    return f"flwr {installed} is installed; this uses private modules of {', '.join(FLOWER)}: {instead}"


class RuntimeConnection:
    """A connection to the Runtime API of a SuperNode on this machine, like the connection of
    Flower's executor and ClientApps.

    Args:
        server: host:port of the API.
        component: the SuperNode's name for this kind of process.
        interceptors: interceptors that sign or mark each call.
    """

    def __init__(self, server: str, component: str, *interceptors: Any) -> None:
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supercore.runtime import RuntimeHttpClient

        self._client = RuntimeHttpClient.from_server_address(
            server_address=server,
            insecure=True,  # the SuperNode is on this machine
            root_certificates=None,
            interceptors=[RuntimeVersionHttpInterceptor(component_name=component), *interceptors],
            retry_invoker=None,
        )

    @classmethod
    def claiming(cls, server: str, secret: bytes) -> RuntimeConnection:
        """Open the connection of an executor. The secret that it shares with the SuperNode entitles
        it to claim tasks.
        """
        from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor

        methods = {"/flwr.proto.Runtime/AcquireTask"}
        return cls(
            server,
            "SuperExec",
            SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=methods),
        )

    @classmethod
    def working(cls, server: str, token: str) -> RuntimeConnection:
        """Open the connection of a ClientApp, which uses the token of its task."""
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor

        return cls(server, "flwr-clientapp", RuntimeTokenHttpInterceptor(token))

    def claim(self) -> tuple[str, int] | None:
        """Claim a task and return its token and number; None if there is none.

        Raises:
            httpx.HTTPError: the SuperNode does not answer, or refuses.
        """
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.constant import TaskType

        answer = self._client.AcquireTask(
            AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        )
        return (answer.token, answer.task.task_id) if answer.token else None

    def pull(self) -> tuple[Message, Context]:
        """Return the message and the context of the task. The app that comes with them is not
        fetched.

        This is `flwr.supernode.runtime.run_clientapp.pull_task_input` with a timeout for a message
        that never arrives completely.

        Raises:
            TimeoutError: the task has no message.
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

        client = self._client
        given = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
        TaskIdentity.node_id = given.context.node_id
        context = context_from_proto(given.context)
        deadline = time.monotonic() + _PULL_S
        while not (pulled := client.PullMessages(PullAppMessagesRequest())).messages_list:
            if time.monotonic() > deadline:  # a task arrives a moment before its message
                raise TimeoutError("the SuperNode has a task without a message")
            time.sleep(SOON_S)
        tree, node = pulled.message_object_trees[0], Node(node_id=context.node_id)
        message = pull_and_inflate_object_from_tree(
            tree,
            make_pull_object_fn_protobuf(client.PullObject, node, context.run_id),
            make_confirm_message_received_fn_protobuf(
                client.ConfirmMessageReceived, node, context.run_id
            ),
            return_type=Message,
            max_time=_PULL_S,
            initial_backoff=0.05,  # a message's first parts arrive a moment after it
        )
        # the object's own content does not hold its ID
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message, context

    def beat(self) -> None:
        """Send a heartbeat for the task (httpx.HTTPError if it fails)."""
        from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

        self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest())

    def push(self, reply: Message, context: Context) -> None:
        """Send the reply."""
        from flwr.supernode.runtime.run_clientapp import push_message

        push_message(self._client, reply, context)

    def end(self, context: Context | None, failure: str) -> None:
        """End the task, with the reason if it failed and an empty text otherwise."""
        from flwr.common.constant import SubStatus
        from flwr.supernode.runtime.run_clientapp import push_task_output

        status = SubStatus.FAILED if failure else SubStatus.COMPLETED
        push_task_output(client=self._client, context=context, sub_status=status, details=failure)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()


def failed_reply(message: Message, details: str) -> Message:
    """Make the reply of a ClientApp that raised an exception."""
    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode

    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, details), reply_to=message)


def called_by(function: Callable[..., Any]) -> Iterator[Any]:
    """Yield the app's function and the mods that come before it. Flower joins them in one function
    and keeps them in its closures.

    Args:
        function: the `call_next` of a mod.
    """
    waiting: list[Any] = [function]
    while waiting:
        each = waiting.pop()
        if isinstance(each, FunctionType) and each.__module__ == "flwr.client.mod.utils":
            waiting += [cell.cell_contents for cell in each.__closure__ or ()]
        else:
            yield each


class Sleeps(Protocol):
    """The part of the module `time` that Flower's loop uses."""

    def sleep(self, seconds: float) -> None:
        """Pause."""


def run_supernode(pauses: Sleeps) -> None:
    """Run Flower's SuperNode with the arguments of `flower-supernode`, but with different pauses
    between polls and between heartbeats.
    """
    with importing():
        from flwr.supercore import heartbeat
        from flwr.supernode import fleet_http_connection, start_client_internal
        from flwr.supernode.cli import flower_supernode

    vars(start_client_internal)["time"] = pauses
    for module in (heartbeat, fleet_http_connection):
        vars(module)["HEARTBEAT_DEFAULT_INTERVAL"] = HEARTBEAT_S
    _look_again_soon(start_client_internal)
    logging.getLogger("flwr").addFilter(_says_what_failed)
    flower_supernode()


def _says_what_failed(record: logging.LogRecord) -> bool:
    """Add the connection that failed and the remedy to Flower's message "Connection attempt failed,
    retrying in 2 seconds".
    """
    if str(record.msg).startswith("Connection attempt failed, retrying"):
        record.msg += (
            ". The SuperLink (--superlink) cannot be reached: its operator should check its "
            "processes and restart those that have ended; this SuperNode then connects by itself"
        )
    return True


def hasten_server_grid() -> None:
    """Let the grid of this ServerApp poll for the parts of a message every 0.1 s instead of every
    second.
    """
    from flwr.superlink.grid import http_grid

    _look_again_soon(http_grid)


def wait_by_steady_clock() -> None:
    """Let the grid of this ServerApp measure its timeouts by a clock that cannot be set.

    Flower reads the time of day. If the clock were set back by an hour, a round would wait an hour
    longer for a silent node. If it were set forward, the round would end at once. The grids of
    versions before 1.41 are in another module and keep the time of day.
    """
    with suppress(ModuleNotFoundError):
        from flwr.superlink.grid import http_grid, inmemory_grid

        for module in (http_grid, inmemory_grid):
            vars(module)["time"] = SimpleNamespace(time=time.monotonic, sleep=time.sleep)


def _look_again_soon(module: ModuleType) -> None:
    """Let `module` poll for parts of a message sooner. This has no effect in a version of Flower
    without that function.
    """
    names = vars(module)
    if "pull_objects" in names:
        names["pull_objects"] = partial(names["pull_objects"], initial_backoff=SOON_S)
