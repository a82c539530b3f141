"""The questions to a deployment's nodes, and the process that signs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedlgm.errors import RunError
from fedlgm.wire import printable
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.protocol.messages import Question

_PATIENCE_S = 60.0
_AGAIN_S = 0.5


@dataclass(frozen=True)
class NodeQuestions:
    """What all questions of one run have in common.

    Attributes:
        run: label of the run.
        work: the requested work, as names that are installed on the nodes (see `Question`).
        sign: function that signs a question with the server's key. Nodes whose policy names this
            key answer only questions with a signature.
    """

    run: str
    work: Mapping[str, Any]
    sign: Callable[[Question], str] | None = None

    def header(self, question: Question) -> dict[str, Any]:
        """The header of a question, with a signature if there is a signer.

        Raises:
            RunError: the signer refuses.
        """
        header = question.header()
        return header if self.sign is None else header | {"signature": self.sign(question)}


def signed_at(socket: Path, question: Question) -> str:
    """The signature of a question by the process that holds the server's key. If the process has
    ended, this waits up to a minute until it has been started again.

    Args:
        socket: socket of that process.
        question: the question.

    Raises:
        RunError: the process does not answer, or does not sign this question.
    """
    return str(_ask_signer(socket, "sign", asdict(question))["signature"])


def unused_at(socket: Path, stem: str) -> list[str]:
    """Names of the registered runs for which no question has been signed, the newest last.

    Args:
        socket: socket of the process that holds the server's key.
        stem: beginning of the runs' names, which all runs of a recipe share.

    Raises:
        RunError: the process does not answer, or refuses.
    """
    return [str(run) for run in _ask_signer(socket, "unused", {"stem": stem})["runs"]]


def _ask_signer(socket: Path, ask: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    header = {"protocol": protocol.PROTOCOL, "ask": ask, **fields}
    deadline, silent = time.monotonic() + _PATIENCE_S, "the signer of this deployment's questions"
    while True:
        try:
            answer, _ = frames.exchange(str(socket), header, b"", timeout=_PATIENCE_S)
            break
        except (frames.NoService, frames.FrameError) as error:  # the process was killed
            if time.monotonic() > deadline:
                raise RunError(
                    f"{silent} does not answer: start it again, for example with `fedlgm deploy "
                    "up`; then the same command, without --fresh, resumes the run"
                ) from error
        except RunError as error:
            raise RunError(f"{silent} does not answer: {error}") from error
        time.sleep(_AGAIN_S)
    if answer.get("ok") is not True:
        why = printable(str(answer.get("why")), 500)
        raise RunError(f"the signer of this deployment's questions does not sign this one: {why}")
    return answer
