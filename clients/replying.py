"""What a server learns of a client's errors: the reason for a refusal, and otherwise only that an
error occurred.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from clients.flower_private import failed_reply
from fedlgm.errors import FedlgmError, RunError

_log = logging.getLogger("fedlgm.client")


class ReplyingApp(ClientApp):
    """A `ClientApp` that replies with a `FedlgmError`'s sentence.

    Flower would send the text of the exception that it receives. In a simulation this text is Ray's
    whole traceback, which quotes data that must not leave the client. The cause, such as the
    exception of a user's function, goes to the client's log.

    Example:
        >>> app = ReplyingApp()
        >>> @app.train()
        ... def train(message, context): ...
    """

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the app's reply, or an error with the sentence of the `FedlgmError` that was
        raised.
        """
        try:
            return super().__call__(message, context)
        except FedlgmError as error:
            _log.error("%s", error, exc_info=error.__cause__)
            return failed_reply(message, str(error))


@contextmanager
def quiet(what: str, *kept: type[Exception]) -> Iterator[None]:
    """Keep the texts of errors on the node, because they may quote private data.

    Args:
        what: the part of the client that may fail, for the message.
        kept: types of errors that pass unchanged.

    Raises:
        RunError: any other error was raised. Flower sends this error's text to the server and
            writes its cause to the node's log.

    Example:
        >>> with quiet("training"):
        ...     raise ValueError("patient 4711 has no date of birth")
        Traceback (most recent call last):
        fedlgm.errors.RunError: this client's training failed: the log of its node says why
    """
    try:
        yield
    except kept:
        raise
    except Exception as error:
        raise RunError(f"this client's {what} failed: the log of its node says why") from error
