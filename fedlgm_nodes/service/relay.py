"""The relay, which forwards bytes between Flower and a node's release service. It has no keys or
data and imports no torch.

The header of a frame travels as text in a config record of the message. The body of a frame, such
as the model or an answer's numbers, travels as bytes in config records. A malicious relay can lose
or damage messages, but it cannot read the node's data or make the service release more than its
policy permits.
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
    """Pass the question in a Flower message to the service, and return the answer as records.

    Args:
        content: content of a message of `fedlgm_nodes.server.link`.
        socket: socket of the node's service.
        timeout: seconds for the exchange.

    Raises:
        RunError: the content holds no question, or the service cannot be reached or does not
            answer.
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
    # the first part goes into the header's record, which saves one object
    first = records.pop(f"{BODY}.0", {})
    reply = RecordDict({wire.CONFIG: ConfigRecord({HEADER: json.dumps(answer), **first})})
    reply.update({name: ConfigRecord(dict(values)) for name, values in records.items()})
    return reply


def make_client_app() -> ClientApp:
    """Make a ClientApp for unmodified Flower, which asks the service whose socket is named in the
    SuperNode's `--node-config`.

        flower-supernode ... --node-config 'release-socket="/srv/node/run/release.sock"'

    Flower starts a process with uploaded code for each message. Run the SuperNode as a user who may
    connect to the socket but cannot read the node's files. `fedlgm_nodes.service.executor` needs no
    uploaded code.
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
