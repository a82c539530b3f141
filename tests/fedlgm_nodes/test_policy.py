"""A node's policy: what it says wrong is refused with the key and the reason."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from fedlgm.errors import ConfigError, RunError
from fedlgm_nodes.policy import Policy, Refusal
from fedlgm_nodes.policy_template import policy_text
from fedlgm_nodes.service.folder import NodeFolder
from tests.support import nodes
from tests.support.nodes import make_node


def load(tmp_path: Path, text: str) -> Policy:
    (tmp_path / "policy.toml").write_text(text)
    return Policy.load(tmp_path / "policy.toml")


def test_the_template_is_a_policy_of_its_defaults(tmp_path):
    policy = load(tmp_path, policy_text("node", {}))
    assert policy.privacy.trust == ("local",)
    assert policy.privacy.largest_clip == 1.0
    assert "none" not in policy.allow.mechanisms
    assert policy.ask == type(policy.ask)(server_key="")
    for section in ("node", "data", "privacy", "allow", "ask", "limits", "socket"):
        assert f"[{section}]" in policy_text("node", {})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("client = 0", "client = 5", "client = 5 must be below population"),
        ("client = 0", 'client = "0"', "node.client: must be a whole number"),
        ("epsilon = 8.0", "epsilon = 0.0", "privacy.epsilon"),
        ("epsilon = 8.0", "epsilon = nan", "privacy.epsilon"),
        ("epsilon = 8.0", "epsilon = inf", "privacy.epsilon"),
        ("delta = 1e-05", "delta = 1.0", "privacy.delta"),
        ('trust = ["local"]', "trust = []", "trust must name"),
        ('trust = ["local"]', 'trust = ["server"]', "privacy.trust"),
        ("min_noise", "max_noise", "privacy.max_noise_multiplier: unknown key"),
        ('server_key = ""', 'server_key = "abc"', "ask.server_key: must be an Ed25519 public key"),
        ('kind = "numpy"', 'kind = "tsv"', "data.kind"),
        ('kind = "numpy"', 'kind = "idx"', "needs labels"),
        ('kind = "numpy"', 'kind = "images"', "needs class_names"),
        ('kind = "numpy"', 'kind = "loader"', "needs loader"),
        ("shape = [1, 28, 28]", "shape = [0]", "shape must hold positive sizes"),
        ("[privacy]", "[privacy", "not valid TOML"),
        ("[data]", "[dataset]", "data: is required"),
        ("[socket]", "[sockets]", "sockets: unknown key; did you mean 'socket'?"),
        (
            "epsilon = 8.0",
            "epsilonn = 8.0",
            "privacy.epsilonn: unknown key; did you mean 'epsilon'?",
        ),
        (
            'name = "node"',
            'name = "St. Mary"',
            "node.name: must be at most 64 letters, digits, '_', '.' and '-'",
        ),
        (
            '"snr-consistent"',
            '"snr-consistant"',
            "unknown name 'snr-consistant'; did you mean 'snr-consistent'?",
        ),
        ('"mlp"', '"mpl"', "allow.models: unknown name 'mpl'"),
        ('["classification"]', '["classify"]', "allow.tasks: unknown name 'classify'"),
        ("shape = [1, 28, 28]", "shape = []", "data.shape: must have at least 1 entries"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, old, new, message):
    text = policy_text("node", {})
    assert old in text
    with pytest.raises(ConfigError, match=None) as error:
        load(tmp_path, text.replace(old, new)).allow.check_names()
    assert message in str(error.value)
    assert "policy.toml" in str(error.value)


def test_a_missing_policy(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        Policy.load(tmp_path / "policy.toml")
    with pytest.raises(RunError, match="fedlgm node init"):
        NodeFolder.open(tmp_path)


def test_a_folder_is_made_once_and_for_its_owner_only(tmp_path):
    folder = make_node(tmp_path / "node")
    for path, mode in (
        (folder.policy_file, 0o600), (folder.path / "state", 0o700),
        (folder.path / "state/service.key", 0o600), (folder.ledger_file, 0o600), (folder.witness_file, 0o600),
        (folder.path / "witness", 0o700), (folder.path / "run", 0o750), (folder.public_file, 0o644),
    ):  # fmt: skip
        assert stat.S_IMODE(path.stat().st_mode) == mode, path
    with pytest.raises(RunError, match="already exists"):
        NodeFolder.create(folder.path)
    with pytest.raises(ConfigError, match="population"):
        NodeFolder.create(tmp_path / "wrong", {"client": 4})
    assert not list(tmp_path.glob("*wrong*"))


def test_two_nodes_have_different_keys(tmp_path):
    one, two = make_node(tmp_path / "one"), make_node(tmp_path / "two")
    assert one.public()["service_key"] != two.public()["service_key"]


def test_a_plan_with_less_noise_than_the_policy_asks_for(tmp_path):
    text = policy_text("node", {}).replace(
        "min_noise_multiplier = 0.0", "min_noise_multiplier = 3.0"
    )
    policy = load(tmp_path, text)
    policy.admit(nodes.plan(3.1))
    with pytest.raises(Refusal, match=r"at least 3 is needed"):
        policy.admit(nodes.plan(2.9))


def test_a_plan_whose_bounds_are_larger_than_the_policy_allows(tmp_path):
    policy = load(
        tmp_path, policy_text("node", {}).replace("largest_clip = 1.0", "largest_clip = 0.5")
    )
    policy.admit(nodes.plan(bound=0.4))
    with pytest.raises(Refusal, match=r"at most 0.5 is allowed"):
        policy.admit(nodes.plan(bound=2.0))
