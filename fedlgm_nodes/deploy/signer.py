"""The process that holds the key for a deployment's questions and signs only questions of
registered runs.

A ServerApp runs its submitter's code as the SuperLink's user, so the submitter can read every key
of this user. The signing key therefore belongs to another user, whose process answers on a Unix
socket. The process signs a question if an operator has registered its run, if the question has the
run's work and plan, and if nothing else was signed for this round and client. A process with access
to the socket can obtain only signatures for registered runs.

    python -m fedlgm_nodes.deploy.signer DIR/signer
"""

from __future__ import annotations

import logging
import os
import socket
import socketserver
import sqlite3
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedlgm.errors import FedlgmError, RunError
from fedlgm.files import explain_failure
from fedlgm.wire import printable
from fedlgm.wording import first_problem
from fedlgm_nodes.deploy.deployment_folder import SignerFolder
from fedlgm_nodes.deploy.registration import Registration, registered_runs
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.protocol.frames import FrameError
from fedlgm_nodes.protocol.messages import Question
from fedlgm_nodes.secagg.steps import NO_MODEL
from fedlgm_nodes.service.ending import on_order_to_stop

_PATIENCE_S = 30.0  # seconds within which a question must arrive
_log = logging.getLogger("fedlgm.signer")
_SCHEMA = """CREATE TABLE IF NOT EXISTS signed (
    run TEXT, round INTEGER, client INTEGER, content TEXT NOT NULL, PRIMARY KEY (run, round, client)) WITHOUT ROWID"""


class _Ask(BaseModel):
    """A question from an untrusted sender."""

    model_config = ConfigDict(extra="forbid", strict=True)
    protocol: int
    ask: str
    run: str = Field(max_length=200)
    round: int
    client: int
    plan: str
    model: str = Field(pattern="^[0-9a-f]{64}$")
    work: dict[str, Any]
    nonce: str = Field(pattern="^[0-9a-f]{0,64}$")
    service: str = Field(pattern="^[0-9a-f]{64}$")
    expect: dict[str, Any] | None = None


class _Unused(BaseModel):
    """A request for the names of a recipe's unused runs, from an untrusted sender."""

    model_config = ConfigDict(extra="forbid", strict=True)
    protocol: int
    ask: str
    stem: str = Field(pattern="^[A-Za-z0-9._-]{1,200}$")


class Signer:
    """Signs the questions of registered runs.

    Args:
        folder: folder of the signer.

    Raises:
        RunError: the key cannot be used.
    """

    def __init__(self, folder: SignerFolder) -> None:
        self._folder, self._key, self._lock = folder, folder.key(), threading.Lock()
        self._signed = sqlite3.connect(
            folder.signed_file, isolation_level=None, check_same_thread=False
        )
        self._signed.execute("PRAGMA synchronous = FULL")
        self._signed.execute(_SCHEMA)

    def sign(self, question: Question) -> str:
        """Sign a question, and return the signature.

        Raises:
            RunError: its run is not registered, or the question does not belong to that run.
        """
        registered = Registration.load(self._folder.runs, question.run)
        if registered is None:
            raise RunError(
                f"the run {printable(question.run, 80)!r} is not registered; as the signer's user: "
                "fedlgm deploy register RECIPE DIR"
            )
        if problem := registered.problem(question):
            raise RunError(problem)
        if question.model == NO_MODEL:  # such a question asks for keys and releases nothing
            return protocol.sign(self._key, "question", question.digest)
        content = protocol.digest(question.plan, question.model)
        key = (question.run, question.round, question.client)
        with self._lock:  # on disk before the signature is sent
            self._signed.execute(
                "INSERT OR IGNORE INTO signed VALUES (?, ?, ?, ?)", (*key, content)
            )
            (first,) = self._signed.execute(
                "SELECT content FROM signed WHERE run = ? AND round = ? AND client = ?", key
            ).fetchone()
        if first != content:
            raise RunError(
                f"another plan or model was signed for round {question.round} and client "
                f"{question.client} of this run"
            )
        return protocol.sign(self._key, "question", question.digest)

    def unused_runs(self, stem: str) -> list[str]:
        """Registered runs whose names begin with this stem and for which nothing has been signed,
        the newest last.
        """
        with self._lock:
            used = {run for (run,) in self._signed.execute("SELECT DISTINCT run FROM signed")}
        return [run for run in registered_runs(self._folder.runs, stem) if run not in used]

    def close(self) -> None:
        """Close the record of signed questions."""
        self._signed.close()


class _Connection(socketserver.StreamRequestHandler):
    timeout = _PATIENCE_S

    def __init__(self, signer: Signer, *given: Any) -> None:
        self._signer = signer
        super().__init__(*given)

    def handle(self) -> None:
        try:
            head, _ = frames.lengths(
                self.rfile.read(frames.PREFIX_BYTES).ljust(frames.PREFIX_BYTES, b"\0"), 0
            )
            answer = self._answer(frames.parse_header(self.rfile.read(head)))
        except (FedlgmError, FrameError) as error:
            _log.warning("not signed: %s", error)
            answer = {"ok": False, "why": str(error)}
        except ValidationError as error:
            answer = {"ok": False, "why": first_problem(error)}
        except Exception:  # no content of a question may end the signer
            _log.exception("a question failed")
            answer = {"ok": False, "why": "see the signer's log"}
        self.wfile.write(frames.encode(answer))

    def _answer(self, header: dict[str, Any]) -> dict[str, Any]:
        if header.get("protocol") not in protocol.SUPPORTED or header.get("ask") not in (
            "sign",
            "unused",
        ):
            raise RunError(
                f"a signer of protocol {protocol.PROTOCOL} only signs questions and names "
                "registered runs"
            )
        if header["ask"] == "unused":
            return {
                "ok": True,
                "runs": self._signer.unused_runs(_Unused.model_validate(header).stem),
            }
        given = _Ask.model_validate(header)
        question = Question(**given.model_dump(exclude={"ask"}))
        signature = self._signer.sign(question)
        _log.info("signed round %d, client %d of %r", question.round, question.client, question.run)
        return {"ok": True, "signature": signature}


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

    def __init__(self, path: Path, signer: Signer) -> None:
        super().__init__(
            str(path), cast(Any, partial(_Connection, signer)), bind_and_activate=False
        )
        draft = path.with_suffix(".new")
        draft.unlink(missing_ok=True)
        self.socket.bind(os.fspath(draft))
        draft.chmod(0o666)  # the permissions of its folder say who may connect
        self.socket.listen(64)
        draft.replace(path)

    def get_request(self) -> tuple[socket.socket, Any]:
        link, _ = self.socket.accept()
        return link, ("", 0)


def run(folder: SignerFolder) -> None:
    """Sign until SIGTERM or SIGINT.

    Raises:
        RunError: the key or the socket cannot be used.
    """
    signer = Signer(folder)
    try:
        server = _Server(folder.socket, signer)
    except OSError as error:
        raise RunError(explain_failure(f"cannot listen on {folder.socket}", error)) from error
    on_order_to_stop(server.shutdown)
    _log.info("signing the questions of the runs registered in %s", folder.runs)
    with server:
        server.serve_forever()
    folder.socket.unlink(missing_ok=True)
    signer.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    try:
        run(SignerFolder(Path(sys.argv[1])))
    except FedlgmError as error:
        sys.exit(f"error: {error}")
