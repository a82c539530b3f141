"""Questions to all connected nodes for which nothing is charged, and the nodes' answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from flwr.app import Message

from fedlgm_nodes.server.greetings import Greetings
from fedlgm_nodes.server.link import NodeLink, content_of, header_of

_POLL_S = 0.2
_SILENT_S = 3.0


def inquire(
    link: NodeLink, header: Callable[[int], dict[str, Any]], seconds: float
) -> dict[int, dict[str, Any]]:
    """Ask all connected nodes, and return the header of each answer by client. Nodes that do not
    answer in time are omitted. The caller must check the answers.

    A node that supports only the previous protocol is asked again in that protocol.

    Args:
        link: link to the nodes.
        header: function from a client to the header of its question.
        seconds: time to wait for answers.
    """
    link.look()
    answers = _ask(link, sorted(link.online), header, seconds)
    older = [client for client, answer in answers.items() if link.learn(client, answer)]
    return answers | (_ask(link, older, header, seconds) if older else {})


def _ask(
    link: NodeLink, clients: list[int], header: Callable[[int], dict[str, Any]], seconds: float
) -> dict[int, dict[str, Any]]:
    contents = iter(
        [content_of({**header(client), "protocol": link.protocol(client)}) for client in clients]
    )
    sent = dict(zip(link.greet(clients, lambda: next(contents)), clients, strict=True))
    answers: dict[int, dict[str, Any]] = {}
    started, greeted = time.monotonic(), False
    while sent and (silent := time.monotonic() - started) < seconds:
        # A SuperNode that is one reply behind (see `greetings`) sends its reply after the next
        # message.
        if silent > _SILENT_S and not greeted:
            link.greet(list(sent.values()), Greetings.content)
            greeted = True
        for reply in link.replies([id_ for id_ in sent if id_]):
            client = sent.pop(reply.metadata.reply_to_message_id)
            answer = _header(reply)
            if answer is not None:
                answers[client] = answer
        time.sleep(_POLL_S if sent else 0)
    return answers


def _header(reply: Message) -> dict[str, Any] | None:
    return None if reply.has_error() else header_of(reply)
