"""Whatever bytes a stranger sends to a node's service, it answers in time and releases nothing."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.protocol.messages import Question
from fedlgm_nodes.service.folder import NodeFolder
from tests.support import nodes
from tests.support.nodes import BODY, hello, plan, rows
from tests.support.patience import LIMIT_S, wait_until

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=20), st.just("release"), st.just(1)
)  # fmt: skip
FRAMES = st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda h, b: frames.encode({}, b)[:8] + h, st.binary(max_size=50), st.binary(max_size=20)
    ),
    st.builds(
        lambda header, body: struct.pack("<IQ", len(header), len(body)) + header + body,
        st.one_of(st.binary(max_size=100), st.text(max_size=100).map(str.encode)),
        st.binary(max_size=100),
    ),
    st.builds(
        lambda values, body: frames.encode(values, body),
        st.dictionaries(
            st.sampled_from(
                [
                    "protocol",
                    "ask",
                    "run",
                    "round",
                    "client",
                    "plan",
                    "work",
                    "nonce",
                    "expect",
                    "x",
                ]
            ),
            st.recursive(
                LEAVES,
                lambda inner: (
                    st.lists(inner, max_size=3)
                    | st.dictionaries(st.text(max_size=5), inner, max_size=3)
                ),
                max_leaves=5,
            ),
        ),
        st.binary(max_size=100),
    ),
    st.builds(
        lambda cut, flip, at: _damaged(cut, flip, at),
        st.integers(0, 3000),
        st.integers(1, 255),
        st.integers(0, 3000),
    ),
)
WHOLE = frames.encode(
    Question("run", 1, 1, plan().to_json(), protocol.sha256(BODY), nodes.WORK, "00").header(), BODY
)  # for client 1: whole, it is refused


def _damaged(cut: int, flip: int, at: int) -> bytes:
    frame = bytearray(WHOLE[: max(20, len(WHOLE) - cut)])
    frame[at % len(frame)] ^= flip
    return bytes(frame)


def send(path: Path, data: bytes) -> bytes:
    """Send bytes, say that no more come, and read what comes back."""
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(30)
        link.connect(str(path))
        received = b""
        try:
            link.sendall(data)
            link.shutdown(socket.SHUT_WR)
            while piece := link.recv(1 << 16):
                received += piece
        except (BrokenPipeError, ConnectionResetError):
            pass
        return received


def _check_fuzz(folder: NodeFolder, frame: bytes) -> None:
    answer = send(folder.socket, frame)
    if answer:
        head, _ = frames.lengths(answer[: frames.PREFIX_BYTES], 1 << 20)
        header = frames.parse_header(answer[frames.PREFIX_BYTES : frames.PREFIX_BYTES + head])
        assert header["ok"] is False or "epsilon_spent" in header


@settings(max_examples=400, suppress_health_check=list(HealthCheck), database=None)
@given(frame=FRAMES)
def test_no_bytes_are_answered_with_a_release(lasting, frame):
    _check_fuzz(lasting, frame)


@pytest.mark.slow
def test_three_thousand_frames(lasting):
    @settings(max_examples=3_000, suppress_health_check=list(HealthCheck), database=None)
    @given(frame=FRAMES)
    def check(frame: bytes) -> None:
        _check_fuzz(lasting, frame)

    check()
    assert rows(lasting) == []


def test_nothing_was_charged_by_the_fuzz(lasting):
    assert rows(lasting) == []


@pytest.mark.parametrize(
    "more", [{"x" * 300_000: 1}, {"work": {"mechanism": {}, "model": {}, "\u00e9" * 300_000: 1}}]
)
def test_a_refusal_is_short_whatever_was_asked(lasting, more):
    """It travels back in a header, and is a line of this node's log."""
    log = lasting.path.with_name("node.log")
    before = log.stat().st_size
    header, _ = frames.exchange(
        str(lasting.socket), nodes.asked(lasting).header() | more, BODY, timeout=LIMIT_S
    )
    assert header["ok"] is False
    assert len(header["why"]) <= 1000
    assert log.stat().st_size - before < 3000


def test_sizes_are_limited_before_anything_is_read(lasting):
    for prefix in (struct.pack("<IQ", 2**32 - 1, 0), struct.pack("<IQ", 10, 2**63)):
        answer = send(lasting.socket, prefix)
        assert b"too-large" in answer


def test_slow_questions_are_ended_and_others_answered_meanwhile(lasting):
    with socket.socket(socket.AF_UNIX) as slow:
        slow.settimeout(10)
        slow.connect(str(lasting.socket))
        slow.sendall(WHOLE[:30])
        assert hello(lasting)["ok"]
        started = time.monotonic()
        assert b"slow" in slow.recv(1 << 16)
        assert time.monotonic() - started < 5


def test_a_hundred_half_sent_questions(lasting):
    links = []
    try:
        for _ in range(100):
            link = socket.socket(socket.AF_UNIX)
            link.settimeout(LIMIT_S)
            link.connect(str(lasting.socket))
            with contextlib.suppress(BrokenPipeError):  # refused already
                link.sendall(b"\x01")
            links.append(link)
    finally:
        answered = sum(b"busy" in link.recv(1 << 16) for link in links[20:40])
        for link in links:
            link.close()
    assert answered == 20
    wait_until(lambda: hello(lasting)["ok"])
