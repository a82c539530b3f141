"""Who is asked: the nodes whose registered keys the enrolment names, and nobody else."""

from __future__ import annotations

import base64

import pytest
import torch

from fedlgm_nodes.server.enrolment import key_digest
from tests.support.node_grids import pem


def test_clients_are_who_the_enrolment_says(federation):
    """Node ids of Flower come and go; here they are exchanged between rounds."""
    first = federation.run()
    federation.link.node_of = {7: 2, 8: 0, 9: 1}
    assert torch.equal(federation.run(), first)


def test_a_stranger_is_not_asked(federation):
    federation.keys[1] = pem()  # enrolled with this key; connected with another
    federation.run()
    assert "n1" in federation.reports[0].lost
    assert any("not enrolled" in line for line in federation.lines)
    assert {client for client, _ in federation.link.sent} == {0, 2}


def test_a_strangers_key_that_nobody_can_read_ends_no_run(federation):
    """Of a curve that does not exist, where a SuperLink lets nodes bring keys of their own."""
    lines = federation.keys[1].splitlines()
    curve = base64.b64decode(b"".join(lines[1:-1])).replace(
        bytes.fromhex("2b81040022"), bytes.fromhex("2b81040063")
    )
    federation.link.keys[1] = b"\n".join([lines[0], base64.b64encode(curve), lines[-1]])
    with pytest.raises(ValueError, match="not supported"):
        key_digest(federation.link.keys[1])
    federation.run()
    assert federation.reports[0].answered == ["n0", "n2"]
    assert any("not enrolled" in line for line in federation.lines)
