"""Forwards bytes between Flower and a node's release service. It holds nothing private and imports
no torch.

The header of the service's frame travels as text in the message's config record. The model and the
answer travel as bytes in such records. A malicious relay can lose or damage messages, but it cannot
read data or make the service release more than its policy permits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedlgm import wire
from fedlgm.errors import RunError
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol.frames import BODY, HEADER, MASK

SOCKET = "release-socket"  # key of the SuperNode's node config
_TIMEOUT = 3600.0


def forward(content: RecordDict, socket: str | Path, timeout: float = _TIMEOUT) -> RecordDict:
    """Pass a Flower message's question to the service, and return its answer as records.

    Args:
        content: content of a message of `fedlgm_nodes.server.link`.
        socket: socket of the node's service.
        timeout: seconds for the exchange.

    Raises:
        RunError: the content is not such a message, or the service cannot be reached.
    """
    config = content.config_records.get(wire.CONFIG, ConfigRecord())
    header = config.get(HEADER)
    if not isinstance(header, str):
        raise RunError("this node answers only fedlgm's questions, and this message holds none")
    key = config.get(MASK, 0)
    if not isinstance(key, int):
        raise RunError(f"{MASK} must be a number")
    body = frames.body_of(content.config_records, key)
    answer, numbers = frames.exchange(str(socket), header, body, timeout=timeout)
    records = frames.body_records(numbers, key)
    # the first part is in the header's record, which saves one object
    first = records.pop(f"{BODY}.0", {})
    reply = RecordDict({wire.CONFIG: ConfigRecord({HEADER: json.dumps(answer), **first})})
    reply.update({name: ConfigRecord(dict(values)) for name, values in records.items()})
    return reply


def make_client_app() -> ClientApp:
    """ClientApp for stock Flower. It asks the service whose socket the SuperNode's `--node-config`
    names.

        flower-supernode ... --node-config 'release-socket="/srv/node/run/release.sock"'

    Flower starts its process for each message, from uploaded code. Run the SuperNode as a user that
    can only connect to the socket and cannot read the node's files. `fedlgm_nodes.service.executor`
    needs no uploaded code.
    """
    app = ClientApp()
    handle: Callable[[Message, Context], Message] = _relay
    app.train()(handle)
    app.query()(handle)
    return app


def _relay(message: Message, context: Context) -> Message:
    socket = str(context.node_config.get(SOCKET, ""))
    if not socket:
        raise RunError(f'the SuperNode\'s --node-config must say {SOCKET}="/path/of/release.sock"')
    return Message(forward(message.content, socket), reply_to=message)
