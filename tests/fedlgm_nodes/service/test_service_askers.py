"""Whom a node's service answers where it has enrolled a server."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from tests.support import nodes
from tests.support.nodes import BODY, ask, make_node, rows, served
from tests.support.patience import LIMIT_S


def test_only_the_enrolled_server_is_answered(tmp_path):
    server, stranger = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    with served(make_node(tmp_path / "node", server_key=protocol.public_text(server))) as folder:
        assert ask(folder)[0]["code"] == "unsigned"
        assert ask(folder, signer=stranger)[0]["code"] == "unsigned"
        stolen = nodes.asked(folder).header(server)
        assert ask(folder, round=2, signature=stolen["signature"])[0]["code"] == "unsigned"
        assert ask(folder, signer=server)[0]["ok"]
    assert len(rows(folder)) == 1


def test_a_recorded_question_is_not_charged_again(tmp_path):
    """Whoever heard it may send it again, after the data or the software have changed; the server
    asks anew."""
    server = Ed25519PrivateKey.generate()
    folder = make_node(tmp_path / "node", server_key=protocol.public_text(server))
    with served(folder):
        assert ask(folder, signer=server)[0]["ok"]
        assert ask(folder, signer=server, nonce="01")[0][
            "replayed"
        ]  # another question, the same release
        assert ask(folder, signer=server)[0]["replayed"]
    nodes.write_data(tmp_path / "node.npz", nodes.EXAMPLES + 1)
    with served(folder):
        for recorded in ("00", "01"):
            assert ask(folder, signer=server, nonce=recorded)[0]["code"] == "replayed"
        assert len(rows(folder)) == 1
        assert ask(folder, signer=server, nonce="02")[0]["ok"]
    assert len(rows(folder)) == 2


def test_a_question_for_another_node_is_refused(tmp_path):
    """Of the same client number, such as the node that it takes the place of."""
    server = Ed25519PrivateKey.generate()
    before = make_node(tmp_path / "before", server_key=protocol.public_text(server))
    with served(make_node(tmp_path / "node", server_key=protocol.public_text(server))) as folder:
        header, _ = frames.exchange(
            str(folder.socket), nodes.asked(before).header(server), BODY, timeout=LIMIT_S
        )
    assert header["code"] == "unsigned"


def test_what_is_expected_of_the_ledger_cannot_be_taken_out_of_a_question(tmp_path):
    server = Ed25519PrivateKey.generate()
    with served(make_node(tmp_path / "node", server_key=protocol.public_text(server))) as folder:
        position = ask(folder, signer=server)[0]["position"]
        header = nodes.asked(folder, round=2, expect=position).header(server)
        del header["expect"]
        assert (
            frames.exchange(str(folder.socket), header, BODY, timeout=LIMIT_S)[0]["code"]
            == "unsigned"
        )
