"""Enrolment files that cannot be."""

from __future__ import annotations

import pytest
import tomli_w

from fedlgm.errors import ConfigError
from fedlgm_nodes.server.enrolment import Enrolment


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda node: node.update(client=-1), "client: must be"),
        (lambda node: node.update(client=1), "same client"),
        (lambda node: node.update(name="n1"), "same name"),
        (lambda node: node.update(name="clinic\x1b[31m"), "name: must be at most 64"),
        (lambda node: node.update(name="clinic\nround 9: all is well"), "name: must be at most 64"),
        (lambda node: node.update(name=""), "name: must be at most 64"),
        (lambda node: node.update(flower_key="0" * 64), "same flower_key"),
        (lambda node: node.update(service_key="xyz"), "service_key"),
        (lambda node: node.pop("service_key"), "service_key"),
    ],
)
def test_an_enrolment_that_cannot_be(tmp_path, change, message):
    entries = [
        {
            "client": i,
            "name": f"n{i}",
            "flower_key": str(i - 1) * 64 if i else "0" * 64,
            "service_key": f"{i}" * 64,
        }
        for i in range(3)
    ]
    entries[1]["flower_key"] = "0" * 64 if "flower" in message else "9" * 64
    entries[2]["flower_key"] = "8" * 64
    change(entries[0])
    (tmp_path / "enrolment.toml").write_text(tomli_w.dumps({"node": entries}))
    with pytest.raises(ConfigError, match=message):
        Enrolment.load(tmp_path / "enrolment.toml")
