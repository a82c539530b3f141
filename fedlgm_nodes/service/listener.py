"""The process of a release service, which accepts connections on its socket and makes one release
at a time, in bounded time and memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import grp
import logging
import math
import os
import signal
import socket
import stat
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from fedlgm.errors import RunError
from fedlgm.files import explain_failure
from fedlgm.wording import first_problem
from fedlgm_nodes.policy import MIB, Policy, Refusal
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.protocol.frames import FrameError
from fedlgm_nodes.secagg.steps import STEPS
from fedlgm_nodes.service.ask import Answer, Ask
from fedlgm_nodes.service.folder import NodeFolder
from fedlgm_nodes.service.service import Service

_log = logging.getLogger("fedlgm.node")


class Listener:
    """Receives questions for a service from any sender, and sends its answers.

    Args:
        service: the service, which `serve` closes when it ends.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._folder = service, service.folder
        self._busy, self._open, self._stop = asyncio.Lock(), 0, asyncio.Event()

    @property
    def _policy(self) -> Policy:
        return self._service.policy

    async def serve(self) -> None:
        """Answer questions until SIGTERM or SIGINT arrives, or until the ledger cannot be used.

        Raises:
            LedgerError: the ledger cannot be used until it is opened and verified again, for
                example after a full disk.
        """
        self._folder.check_length()
        stop = self._stop
        # the handlers are added before the socket exists, because the socket shows that the service
        # is up
        for number in (signal.SIGTERM, signal.SIGINT):
            # this fails outside the main thread
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
        listener = _listen(self._folder.socket, self._policy.socket.group)
        server = await asyncio.start_unix_server(self._serve_connection, sock=listener, limit=MIB)
        self._service.describe()
        try:
            await stop.wait()
        finally:
            server.close()
            with contextlib.suppress(OSError):
                self._folder.socket.unlink()
            async with self._busy:
                self._service.close()
        if self._service.broken is not None:
            raise self._service.broken

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        limits = self._policy.limits
        began: float | None = None
        pid, uid, _ = _peer(writer.get_extra_info("socket"))
        self._open += 1
        try:
            if self._policy.socket.uids and uid not in self._policy.socket.uids:
                raise Refusal("peer", f"user {uid} may not ask")
            if self._open > limits.connections:
                raise Refusal("busy", f"more than {limits.connections} connections")
            ask, body = await self._receive(reader)
            began = time.monotonic()
            await self._turn()
            began = time.monotonic()
            reads = self._service.data_reads
            answer = await self._answer(ask, body, began)
            if ask.ask in STEPS and not ask.trains and reads == self._service.data_reads:
                # such an answer does not depend on the data and is not delayed, because each vector
                # needs up to four such answers
                began = None
        except Refusal as refusal:
            if refusal.code == "slow":
                # this refusal is sent at a time that the policy sets, even if the work has not
                # ended
                began = None
            _log.info("refused (%s): %s [user %d, process %d]", refusal.code, refusal.why, uid, pid)
            answer = Answer(refusal.header)
        except (ConnectionError, asyncio.IncompleteReadError):
            self._open -= 1
            writer.close()
            return
        except Exception:  # no question may end the service, and no answer may show the error
            _log.exception("a question failed [user %d, process %d]", uid, pid)
            answer = Answer(Refusal("failed", "see this node's log").header)
        if began is not None:
            # The time is counted from the question's turn, because the asker chooses when to
            # connect and when the last byte of a question arrives.
            await asyncio.sleep(self._seconds_left(began))
        try:
            async with asyncio.timeout(limits.receive_seconds):
                writer.write(frames.encode_header(answer.header, len(answer.body)))
                writer.write(answer.body)  # separately, because joining would copy it once more
                await writer.drain()
        except (OSError, TimeoutError):
            # a connection that is closed in the usual way would hold the answer in memory until it
            # is read
            writer.transport.abort()
        finally:
            self._open -= 1
            writer.close()
            if self._service.broken is not None:
                self._stop.set()

    async def _receive(self, reader: asyncio.StreamReader) -> tuple[Ask, bytes]:
        limits = self._policy.limits
        try:
            async with asyncio.timeout(limits.receive_seconds):
                prefix = await reader.readexactly(frames.PREFIX_BYTES)
                try:
                    head, size = frames.lengths(prefix, limits.message_mib * MIB)
                except FrameError as error:
                    raise Refusal("too-large", str(error)) from error
                header = frames.parse_header(await reader.readexactly(head))
                if header.get("protocol") not in protocol.SUPPORTED:
                    raise Refusal(
                        "protocol",
                        "this service speaks protocol "
                        f"{' and '.join(map(str, protocol.SUPPORTED))}, but the question has "
                        f"protocol {header.get('protocol')!r:.20}: server and nodes need "
                        "compatible versions of fedlgm",
                    )
                ask = Ask.model_validate(header)
                return ask, await reader.readexactly(size)
        except TimeoutError:
            raise Refusal(
                "slow", f"the question did not arrive within {limits.receive_seconds:g} s"
            ) from None
        except FrameError as error:
            raise Refusal("frame", str(error)) from error
        except ValidationError as error:
            raise Refusal("malformed", first_problem(error)) from error

    async def _turn(self) -> None:
        """Wait until no other question is being processed, and take the lock `_busy`, which
        `_answer` releases.
        """
        try:
            async with asyncio.timeout(self._policy.limits.queue_seconds):
                await self._busy.acquire()
        except TimeoutError:
            raise Refusal("busy", "other questions are still being answered") from None

    async def _answer(self, ask: Ask, body: bytes, began: float) -> Answer:
        loop, reads = asyncio.get_running_loop(), self._service.data_reads
        work = loop.run_in_executor(None, self._service.answer, ask, body)

        def end_turn(work: asyncio.Future[Answer]) -> None:
            # If a turn could end before its answer is sent, a question that waits for its turn
            # would show when training ended.
            refused = work.cancelled() or isinstance(work.exception(), Refusal)
            timed = (ask.trains and not refused) or reads != self._service.data_reads
            loop.call_later(self._seconds_left(began) if timed else 0.0, self._busy.release)

        # Whatever happens to this connection, the next release waits until this release has ended.
        work.add_done_callback(end_turn)
        try:
            return await asyncio.wait_for(asyncio.shield(work), self._policy.limits.release_seconds)
        except TimeoutError:
            why = "the release took longer than this node allows; the node's ledger says whether it was charged"
            raise Refusal("slow", why) from None

    def _seconds_left(self, began: float) -> float:
        """Seconds until the next time at which a result may be sent, for work that began at
        `began`.
        """
        limits, elapsed = self._policy.limits, time.monotonic() - began
        return moment(elapsed, limits.reply_every_seconds, limits.release_seconds) - elapsed


def moment(elapsed: float, every: float, longest: float) -> float:
    """The time at which the answer to `elapsed` seconds of work is sent, which is `every`, twice
    `every`, four times `every` and so on, or `longest`.

    The time of training depends on the number of examples. Because there are few possible times,
    the time of an answer reveals little about this number. If `every` equals `longest`, there is
    only one possible time. If `every` is 0, the answer is sent at once.

    Example:
        >>> [moment(seconds, 0.5, 10.0) for seconds in (0.1, 0.5, 0.6, 1.9, 9.0)]
        [0.5, 0.5, 1.0, 2.0, 10.0]
    """
    if not every:
        return elapsed
    bucket = every * 2.0 ** max(0, math.ceil(math.log2(elapsed / every))) if elapsed > 0 else every
    return longest if elapsed <= longest < bucket else bucket


def run(folder: Path) -> None:
    """Run the service of a node's folder until SIGTERM or SIGINT arrives.

    Raises:
        FedlgmError: the folder cannot be served.
    """
    np.seterr(all="ignore")

    async def main() -> None:
        await Listener(Service(NodeFolder.open(folder))).serve()

    before = os.umask(0o077)
    try:
        asyncio.run(main())
    finally:
        os.umask(before)


def _listen(path: Path, group: str) -> socket.socket:
    """Create the service's listening socket, to which only the service's user and the given group
    may connect.

    Raises:
        RunError: the socket cannot be created, or another service listens on it. The other service
            then holds a ledger whose file was replaced, since the ledger's lock would otherwise
            have kept this service from starting.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise RunError(f"{path} exists and is not a socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            if probe.connect_ex(os.fspath(path)) == 0:
                raise RunError(
                    f"another service listens at {path}, whose ledger file was replaced while it "
                    "ran: stop that service first"
                )
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o117)
    try:
        listener.bind(os.fspath(draft))
        if group:
            os.chown(draft, -1, grp.getgrnam(group).gr_gid if not group.isdigit() else int(group))
        listener.listen(64)
        draft.replace(path)  # the old socket belongs to a service that has ended
    except (OSError, KeyError) as error:
        listener.close()
        raise RunError(explain_failure(f"cannot listen on {path}", error)) from error
    finally:
        os.umask(before)
    return listener


def _peer(link: Any) -> tuple[int, int, int]:
    """Numbers of the process, user and group that have connected, as reported by the kernel."""
    return struct.unpack(
        "3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )  # type: ignore[return-value]
