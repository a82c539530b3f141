"""Messages between the server and enrolled nodes, over the Grid that Flower gives a ServerApp."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedlgm import wire
from fedlgm.errors import RunError
from fedlgm.wire import printable
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.protocol.frames import HEADER, MASK
from fedlgm_nodes.server.enrolment import Enrolment, key_digest
from fedlgm_nodes.server.round import Asked
from strategies.messages import message_to


class NodeLink:
    """The link to the connected nodes, which it knows as clients. A client is the node whose
    registered key the enrolment names.

    Args:
        runtime: Flower's Grid.
        enrolment: mapping of nodes to clients.
        say: called with each line of progress.
    """

    def __init__(self, runtime: Grid, enrolment: Enrolment, say: Callable[[str], None]) -> None:
        self._runtime, self._say = runtime, say
        self._clients = {node.flower_key: node.client for node in enrolment.node}
        self._strangers: set[str] = set()
        self._protocols: dict[int, int] = {}
        self.online: dict[int, int] = {}  # client -> node id, when last looked

    def nodes(self) -> list[Any]:
        """All registered nodes that are connected, enrolled or not."""
        return list(self._runtime.get_nodes())  # type: ignore[attr-defined]

    def look(self) -> None:
        """Update `online`, and report each connected node that is not enrolled once."""
        self.online = {}
        for node in self.nodes():
            try:
                key = key_digest(node.public_key)
            except ValueError:
                key = ""
            if key in self._clients:
                self.online[self._clients[key]] = node.node_id
            elif key not in self._strangers:
                self._strangers.add(key)
                name = printable(str(node.name or node.node_id), 100)
                self._say(f"a node that is not enrolled is connected; it is not asked: {name}")

    def protocol(self, client: int) -> int:
        """Number of the protocol in which to ask a client's node."""
        return self._protocols.get(client, protocol.PROTOCOL)

    def learn(self, client: int, header: Mapping[str, Any]) -> bool:
        """Learn a node's protocol from its refusal of another protocol, and return whether to ask
        the node again.
        """
        spoken, before = header.get("protocol"), self.protocol(client)
        if header.get("code") == "protocol" and spoken in protocol.SUPPORTED:
            self._protocols[client] = int(spoken)
        return self.protocol(client) != before

    def ask(self, asked: Sequence[Asked]) -> list[dict[str, int]]:
        """Send questions to clients, which must be online.

        Returns: For each client, its message's id -> mask of the answer; empty if the message was
        not accepted.
        """
        key = secrets.randbits(32)
        models: dict[
            int, dict[str, ConfigRecord]
        ] = {}  # nodes that are asked together share the records that are sent
        messages = []
        for part in asked:
            if id(part.model) not in models:
                records = frames.body_records(part.model, key)
                models[id(part.model)] = {
                    name: ConfigRecord(dict(values)) for name, values in records.items()
                }
            content = content_of(part.header, key)
            content.update(models[id(part.model)])
            messages.append(self._message(part.client, content, part.message.metadata.group_id))
        # Messages are sent one by one. If they were sent together, a node would see its message at
        # once and keep asking for parts that have not arrived yet.
        sent = [next(iter(self._runtime.push_messages([message])), "") for message in messages]
        return [{id_: key} if id_ else {} for id_ in sent]

    def greet(self, clients: Sequence[int], content: Callable[[], RecordDict]) -> list[str]:
        """Send a message without a model to each of these clients, which must be online, and return
        the messages' ids. The id of a message that was not accepted is empty.
        """
        messages = [self._message(client, content(), "hello") for client in clients]
        return list(self._runtime.push_messages(messages)) if messages else []

    def replies(self, ids: Sequence[str]) -> Iterable[Message]:
        """Replies to these messages that have arrived."""
        return self._runtime.pull_messages(ids) if ids else ()

    def _message(self, client: int, content: RecordDict, group: str) -> Message:
        return message_to(self._runtime, content, MessageType.TRAIN, self.online[client], group)


def content_of(header: Mapping[str, Any], mask: int = 0) -> RecordDict:
    """The content of a message that has only a header."""
    return RecordDict({wire.CONFIG: ConfigRecord({HEADER: json.dumps(header), MASK: mask})})


def header_of(reply: Message) -> dict[str, Any] | None:
    """The header of an answer; None if no release service can have made the answer."""
    try:
        return frames.parse_header(str(reply.content.config_records[wire.CONFIG][HEADER]).encode())
    except (KeyError, RunError):
        return None


def body_of(reply: Message, key: int) -> bytes:
    """The unmasked numbers of an answer; empty if they cannot be read."""
    try:
        return bytes(frames.body_of(reply.content.config_records, key))
    except RunError:
        return b""
