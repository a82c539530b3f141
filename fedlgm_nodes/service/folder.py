"""A node's folder, with its files and their owners.

DIR/policy.toml        what the operator allows
DIR/state/             noise key (made at the service's first start), service key, ledger, kept
                       answers, open rounds: for the service's user only
DIR/witness/           position of the ledger; best kept on another disk, or in another backup
DIR/run/release.sock   where questions arrive; the group of the folder may connect
DIR/public.toml        what the server's operator needs to enrol this node
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

import tomli_w
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlgm.errors import ConfigError, RunError
from fedlgm.files import Under, draft_folder, explain_failure, write_durably
from fedlgm_nodes.protocol.messages import digest, public_text, sha256
from fedlgm_nodes.service.record import Record

if TYPE_CHECKING:  # what starts and stops a node's processes needs no torch
    from fedlgm_nodes.policy import Policy
    from fedlgm_nodes.service.ledger import NodeLedger

LONGEST_SOCKET = 100
"""Largest number of bytes that the path of a node's Unix socket may have, so that every system
permits it.
"""


class PublicNode(TypedDict):
    """The public data of a node, with which the server's operator enrols it."""

    name: str
    client: int
    service_key: str


@dataclass(frozen=True)
class NodeFolder:
    """The files of one node, in the folder `path`."""

    path: Path

    policy_file = Under("policy.toml")
    """The policy."""
    ledger_file = Under("state/ledger.sqlite")
    """The ledger."""
    witness_file = Under("witness/seen.json")
    """The ledger's witness."""
    record_file = Under("state/record.jsonl")
    """The record of requests, decisions, releases, refusals, policies and pauses, one row on each
    line.
    """
    record_witness = Under("witness/record.json")
    """The record's witness."""
    people_file = Under("state/people.json")
    """Pseudonyms of the people who have counted at this node and of those who have counted
    elsewhere.
    """
    replies = Under("state/replies")
    """Folder of the answers that are stored to be sent again."""
    rounds_file = Under("state/rounds.sqlite")
    """The node's sessions of secure sums. Their secrets are needed only for seconds, so the file
    should be in no backup.
    """
    anchors_file = Under("state/anchors.sqlite")
    """Heads of other parties' chains that the node has signed as a witness."""
    socket = Under("run/release.sock")
    """The socket on which the service listens."""

    def check_length(self) -> None:
        """Refuse a folder whose path is too long for a socket.

        Raises:
            ConfigError: the path of the socket has more than `LONGEST_SOCKET` bytes.
        """
        longest = len(os.fsencode(self.socket.resolve()))
        if longest > LONGEST_SOCKET:
            raise ConfigError(
                f"{self.path}: the path of its socket, run/release.sock, has {longest} bytes; the "
                f"system allows {LONGEST_SOCKET}: use a folder with a shorter path"
            )

    public_file = Under("public.toml")
    """File of the node's public data."""

    @classmethod
    def create(
        cls,
        path: Path,
        values: Mapping[str, Any] | None = None,
        *,
        test_seed: int | None = None,
        signer: Ed25519PrivateKey | None = None,
    ) -> NodeFolder:
        """Create a node's folder with a service key, an empty ledger and a commented policy, but
        without a noise key.

        Args:
            path: folder to create.
            values: values of the policy, see `fedlgm_nodes.policy_template.policy_text`.
            test_seed: for tests only, the seed of a simulation whose noise the node's releases get.
            signer: the node's service key, for example if other nodes' policies name it already; by
                default a fresh key.

        Raises:
            ConfigError: a value of the policy is invalid.
            RunError: `path` exists, or cannot be created.
        """
        from fedlgm_nodes.policy import Policy
        from fedlgm_nodes.policy_template import policy_text
        from fedlgm_nodes.service.ledger import NodeLedger

        if path.exists():
            raise RunError(
                f"{path} already exists: choose another folder, because a node's keys and ledger "
                "are made once"
            )
        try:
            with draft_folder(path) as draft:
                for name, mode in (
                    ("", 0o711),
                    ("state", 0o700),
                    ("state/replies", 0o700),
                    ("witness", 0o700),
                ):
                    (draft / name).mkdir(mode=mode, parents=True)
                (draft / "run").mkdir(mode=0o750)
                for name, mode in (("", 0o711), ("run", 0o750)):
                    # the executor's group needs access, whatever the operator's umask
                    (draft / name).chmod(mode)
                folder = cls(draft)
                text = policy_text(path.name, values or {})
                write_durably(folder.policy_file, text.encode())
                policy = Policy.load(folder.policy_file)
                policy.allow.check_names()
                signer = signer or Ed25519PrivateKey.generate()
                write_durably(draft / "state" / "service.key", signer.private_bytes_raw())
                if test_seed is not None:
                    write_durably(draft / "state" / "test-seed", str(test_seed).encode())
                NodeLedger.create(
                    folder.ledger_file,
                    folder.witness_file,
                    policy.data.name,
                    test=test_seed is not None,
                )
                public: PublicNode = {
                    "name": policy.node.name,
                    "client": policy.node.client,
                    "service_key": public_text(signer),
                }
                write_durably(folder.public_file, tomli_w.dumps(public).encode(), 0o644)
        except OSError as error:
            said = explain_failure(f"cannot make the node's folder {path}", error)
            raise RunError(said.replace(str(draft), str(path))) from error
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(draft), str(path))) from error
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> NodeFolder:
        """Open the folder of an existing node.

        Raises:
            RunError: the folder is not a node's.
        """
        if not (path / "policy.toml").is_file():
            inner = path / "service"
            is_node = (inner / "policy.toml").is_file()
            hint = f"did you mean {inner}?" if is_node else f"make one: fedlgm node init {path}"
            raise RunError(f"{path} is not a node's folder (it has no policy.toml); {hint}")
        return cls(path)

    def policy(self) -> Policy:
        """Read the policy from its file."""
        from fedlgm_nodes.policy import Policy

        return Policy.load(self.policy_file)

    def secret(self, ledger: NodeLedger) -> bytes:
        """The noise key, 32 bytes. Each call before the first release creates a new key, unless the
        folder holds a key that the service did not make.

        Anyone else who made the key could keep a copy and subtract all noise. The ledger therefore
        records the digest of the key that its service makes, and no other key is used.

        Args:
            ledger: the node's ledger, open for writing.

        Raises:
            RunError: the key is missing, damaged, or not the one that the service made.
        """
        key_digest, file = ledger.noise_key(), self.path / "state" / "noise.key"
        if (key_digest and ledger.seq == 0) or not (key_digest or file.exists()):
            key = secrets.token_bytes(32)
            ledger.bind(digest("noise key", ledger.identity, key))
            write_durably(file, key)
            return key
        key = self._key("noise.key")
        if digest("noise key", ledger.identity, key) != key_digest:
            remedy = (
                "restore it, or the ledger that it was made for, from a backup"
                if key_digest
                else "remove it, and the service makes its own when it starts"
            )
            raise RunError(
                f"the noise key {file} was not made by this node's service for this ledger: its "
                f"maker can subtract the noise from answers; {remedy}"
            )
        return key

    def keyed_digest(self, text: str) -> str:
        """A digest of a text that can be computed only with the service's key."""
        return hmac.new(self._key("service.key"), text.encode(), hashlib.sha256).hexdigest()

    def signer(self) -> Ed25519PrivateKey:
        """The service's private key, with which it signs.

        Raises:
            RunError: the key is missing or damaged.
        """
        return Ed25519PrivateKey.from_private_bytes(self._key("service.key"))

    def test_seed(self) -> int | None:
        """The seed of a node that was made for tests; None for any other node."""
        file = self.path / "state" / "test-seed"
        return int(file.read_text()) if file.is_file() else None

    def public(self) -> PublicNode:
        """Read the public data with which the server's operator enrols this node."""
        return cast(PublicNode, tomllib.loads(self.public_file.read_text(encoding="utf-8")))

    def ledger(self, *, readonly: bool = False) -> NodeLedger:
        """The ledger.

        Raises:
            LedgerError: see `NodeLedger`.
        """
        from fedlgm_nodes.service.ledger import NodeLedger

        return NodeLedger(
            self.ledger_file, self.witness_file, self.policy().data.name, readonly=readonly
        )

    def record(self, identity: str) -> Record:
        """Open the record of the node whose ledger has this identity.

        Raises:
            LedgerError: see `Record`.
        """
        return Record(self.record_file, self.record_witness, identity, self._key("service.key"))

    def note_policy(self, record: Record, policy: Policy) -> None:
        """Record the policy that the service enforces, unless it equals the newest recorded policy.

        Args:
            record: the node's record.
            policy: the content of the policy's file.
        """
        record.note_policy(sha256(self.policy_file.read_bytes()), policy.model_dump(mode="json"))

    def _key(self, name: str) -> bytes:
        file = self.path / "state" / name
        try:
            key = file.read_bytes()
        except OSError as error:
            raise RunError(explain_failure(f"the key {file} cannot be read", error)) from error
        if len(key) != 32:
            raise RunError(
                f"the key {file} is damaged: it has {len(key)} bytes, not 32; restore it from a "
                "backup"
            )
        return key
