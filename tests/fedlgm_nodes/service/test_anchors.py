"""A node signs one head of a run's round, and remembers it over restarts."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlgm.privacy.signed import anchor_text
from fedlgm_nodes.policy import Refusal
from fedlgm_nodes.service import anchors
from fedlgm_nodes.service.anchors import AnchorRecord

FIRST, SECOND = "ab" * 32, "cd" * 32


@pytest.fixture
def signer() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def test_the_signature_is_a_witnesss(tmp_path: Path, signer: Ed25519PrivateKey) -> None:
    signature = AnchorRecord(tmp_path / "anchors.sqlite", signer).sign("run", 5, FIRST)
    signer.public_key().verify(bytes.fromhex(signature), anchor_text(5, FIRST))


def test_no_second_head_and_no_earlier_round(tmp_path: Path, signer: Ed25519PrivateKey) -> None:
    file = tmp_path / "anchors.sqlite"
    first = AnchorRecord(file, signer).sign("run", 5, FIRST)
    record = AnchorRecord(file, signer)  # after a restart
    assert record.sign("run", 5, FIRST) == first
    for round_, head in ((5, SECOND), (3, FIRST)):
        with pytest.raises(Refusal, match="has signed another head of this run, of round 5"):
            record.sign("run", round_, head)
    record.sign("run", 10, SECOND)
    record.sign("another run", 5, SECOND)
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT run, round, head FROM anchors ORDER BY run, round")
        assert rows.fetchall() == [
            ("another run", 5, SECOND), ("run", 5, FIRST), ("run", 10, SECOND),
        ]  # fmt: skip


@pytest.mark.parametrize(("round_", "head"), [(0, FIRST), (5, "ab"), (5, ""), (5, "g" * 64)])
def test_what_is_no_head_is_not_signed(
    tmp_path: Path, signer: Ed25519PrivateKey, round_: int, head: str
) -> None:
    with pytest.raises(Refusal, match="64 digits"):
        AnchorRecord(tmp_path / "anchors.sqlite", signer).sign("run", round_, head)


def test_a_full_record_signs_nothing_more(
    tmp_path: Path, signer: Ed25519PrivateKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anchors, "_MOST", 2)
    record = AnchorRecord(tmp_path / "anchors.sqlite", signer)
    for run in ("a", "b"):
        record.sign(run, 5, FIRST)
    with pytest.raises(Refusal, match="at most 2 heads"):
        record.sign("c", 5, FIRST)
    assert record.sign("a", 5, FIRST)  # a repeated question is answered
