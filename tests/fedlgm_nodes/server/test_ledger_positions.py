"""What a server remembers of its nodes' ledgers: over runs, beside other runs, and of the enrolled
services alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlgm.errors import RunError
from fedlgm_nodes.protocol.messages import Position
from fedlgm_nodes.server.ledger_positions import LedgerPositions

SIGNERS = [Ed25519PrivateKey.generate() for _ in range(2)]
KEYS = {client: signer.public_key() for client, signer in enumerate(SIGNERS)}


def at(
    seq: int, client: int = 0, ledger: str = "ledger", signer: Ed25519PrivateKey | None = None
) -> Position:
    return Position.make(ledger, seq, f"head {seq}", signer or SIGNERS[client])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "positions.json"


def test_they_are_kept_over_runs(file):
    LedgerPositions(file, KEYS).put(0, at(3))
    later = LedgerPositions(file, KEYS)
    assert later.get(0) == at(3)
    assert later.get(1) is None
    assert "rolled back: it has 2 releases, but its service signed for 3" in later.problem(0, at(2))
    assert "rolled back" in later.problem(0, Position.make("ledger", 3, "another head", SIGNERS[0]))
    assert "replaced" in later.problem(0, at(9, ledger="another"))
    assert later.problem(0, at(4)) == ""


def test_two_runs_at_once_lose_nothing_of_each_other(file):
    one, other = LedgerPositions(file, KEYS), LedgerPositions(file, KEYS)
    one.put(0, at(20))
    other.put(1, at(7, client=1))
    assert other.get(0) == at(20)
    other.put(0, at(19))  # heard of late: it was given before the twentieth
    for known in (one, other, LedgerPositions(file, KEYS)):
        assert (known.get(0), known.get(1)) == (at(20), at(7, client=1))


def test_an_answer_is_compared_with_what_was_known_when_it_was_asked_for(file):
    one, other = LedgerPositions(file, KEYS), LedgerPositions(file, KEYS)
    one.get(0)
    other.put(0, at(2))
    assert one.problem(0, at(1)) == ""  # given before the other run's, heard of after it
    one.get(0)
    assert "rolled back" in one.problem(0, at(1))


def test_of_another_service_under_the_same_number_nothing_is_expected(file):
    before = Ed25519PrivateKey.generate()
    LedgerPositions(file, {0: before.public_key()}).put(0, at(9, ledger="its", signer=before))
    replaced = LedgerPositions(file, KEYS)
    assert replaced.get(0) is None
    assert replaced.problem(0, at(1)) == ""
    replaced.put(0, at(1))
    assert LedgerPositions(file, KEYS).get(0) == at(1)


@pytest.mark.parametrize("text", ["{", "[]", '{"x": {}}', '{"0": {"ledger": "x"}}', "\udc80"])
def test_a_damaged_file_is_refused(file, text):
    file.write_text(text, errors="surrogatepass")
    with pytest.raises(RunError, match="is damaged"):
        LedgerPositions(file, KEYS)


def test_without_a_file_they_last_as_long_as_the_object():
    known = LedgerPositions(None, KEYS)
    known.put(0, at(3))
    assert known.get(0) == at(3)


def test_an_older_file_is_read(file):
    file.write_text(json.dumps({"0": at(3).values()}))
    assert LedgerPositions(file, KEYS).get(0) == at(3)
