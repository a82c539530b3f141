"""A ClientApp that answers a refusal with one sentence."""

from __future__ import annotations

import logging

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from clients.flower_private import failed_reply
from fedlgm.errors import FedlgmError

_log = logging.getLogger("fedlgm.client")


class ReplyingApp(ClientApp):
    """A `ClientApp` that replies with a `FedlgmError`'s sentence.

    Flower would send the text of the exception that arrives: in a simulation all of Ray's traceback, which quotes what
    the client keeps for itself. The cause, such as the exception of a user's function, goes to the client's log.

    Example:
        >>> app = ReplyingApp()
        >>> @app.train()
        ... def train(message, context): ...
    """

    def __call__(self, message: Message, context: Context) -> Message:
        """The reply, or an error with one sentence."""
        try:
            return super().__call__(message, context)
        except FedlgmError as error:
            _log.error("%s", error, exc_info=error.__cause__)
            return failed_reply(message, str(error))
