"""The key of a node's noise: made by the node's own service, bound to its ledger, and no other is
used."""

from __future__ import annotations

import secrets
import sqlite3

from fedlgm_nodes.protocol.messages import digest
from fedlgm_nodes.service.folder import NodeFolder
from tests.support.nodes import ask, make_node, refused, rows, served


def key_of(folder: NodeFolder):
    return folder.path / "state" / "noise.key"


def test_a_folder_is_made_without_one(tmp_path):
    assert list(make_node(tmp_path / "node").path.rglob("noise.key")) == []


def test_the_service_makes_it_at_its_first_start_and_keeps_it(tmp_path):
    folder = make_node(tmp_path / "node")
    with served(folder):
        first = ask(folder)
    made = key_of(folder).read_bytes()
    assert len(made) == 32
    assert key_of(folder).stat().st_mode & 0o777 == 0o600
    with served(folder):
        assert ask(folder)[1] == first[1]
    assert key_of(folder).read_bytes() == made
    other = make_node(tmp_path / "other")
    with served(other):
        ask(other)
    assert key_of(other).read_bytes() != made


def test_a_key_that_came_with_the_folder_is_refused(tmp_path):
    folder = make_node(tmp_path / "node")
    key_of(folder).write_bytes(secrets.token_bytes(32))
    assert "was not made by this node's service" in refused(folder)
    key_of(folder).unlink()
    with served(folder):
        assert ask(folder)[0]["ok"]


def test_a_key_that_was_exchanged_is_refused(tmp_path):
    folder, other = make_node(tmp_path / "node"), make_node(tmp_path / "other")
    for one in (folder, other):
        with served(one):
            ask(one)
    kept = key_of(folder).read_bytes()
    for wrong in (secrets.token_bytes(32), key_of(other).read_bytes()):
        key_of(folder).write_bytes(wrong)
        assert "restore it, or the ledger that it was made for" in refused(folder)
    key_of(folder).unlink()
    assert "noise.key cannot be read" in refused(folder)
    key_of(folder).write_bytes(kept)
    with served(folder):
        assert ask(folder)[0]["replayed"]


def test_a_key_of_one_ledger_does_not_serve_another(tmp_path):
    """The digest that a ledger records holds the ledger's name, too: copied with its key it fits no
    other ledger."""
    folder = make_node(tmp_path / "node")
    with served(folder):
        ask(folder)
    key = secrets.token_bytes(32)
    key_of(folder).write_bytes(key)
    with sqlite3.connect(folder.ledger_file) as database:
        database.execute(
            "UPDATE meta SET value = ? WHERE key = 'noise_key'",
            (digest("noise key", "another", key),),
        )
    database.close()
    assert "restore it, or the ledger that it was made for" in refused(folder)


def test_a_folder_whose_service_was_started_elsewhere_gets_another_key(tmp_path):
    """The preparer of a folder can start its service, or write what that writes, and keep the
    key."""
    folder, key = make_node(tmp_path / "node"), secrets.token_bytes(32)
    with folder.ledger() as ledger:
        ledger.bind(digest("noise key", ledger.identity, key))
    key_of(folder).write_bytes(key)
    with served(folder):
        assert ask(folder)[0]["ok"]
    assert key_of(folder).read_bytes() != key


def test_a_start_that_was_interrupted_before_the_key_was_on_disk_is_made_up_for(tmp_path):
    folder = make_node(tmp_path / "node")
    with folder.ledger() as ledger:
        ledger.bind(digest("noise key", ledger.identity, secrets.token_bytes(32)))
    with served(folder):
        assert ask(folder)[0]["ok"]


def test_a_node_of_an_earlier_version_makes_a_key_of_its_own_and_keeps_its_ledger(tmp_path):
    """Whoever made its folder has made its key, too."""
    folder = make_node(tmp_path / "node")
    with served(folder):
        ask(folder)
    with sqlite3.connect(folder.ledger_file) as database:
        database.execute("DELETE FROM meta WHERE key = 'noise_key'")
    database.close()
    old = key_of(folder).read_bytes()
    assert "remove it, and the service makes its own" in refused(folder)
    key_of(folder).unlink()
    with served(folder):
        assert not ask(folder)[0]["replayed"]
    assert key_of(folder).read_bytes() != old
    assert len(rows(folder)) == 2
