"""A deployment's folder: the server operator's files and those of each node.

DIR/deploy.toml                address, ports, names
DIR/enrolment.toml             which node is which client
DIR/server/                    SuperLink's certificate and database, Flower's configuration, runs
DIR/signer/                    the key that signs questions, registered runs: of another user than the SuperLink's
DIR/proxy/                     what stands before the SuperLink, if nodes are on other machines
DIR/authority/                 the key that signs certificates: nothing that runs needs it
DIR/nodes/NAME/                everything of one node: goes to its machine
DIR/systemd/                   units for machines that start them by themselves
DIR/logs/, DIR/processes.json  of what `fedlgm deploy up` has started on this machine
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel, ConfigDict, ValidationError

from clients.node.folder import NodeFolder
from fedlgm.errors import ConfigError, RunError

CONNECTION = "fedlgm"


class DeployedNode(BaseModel):
    """One node of `deploy.toml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    port: int  # of its SuperNode's Runtime API, on its own machine


class Settings(BaseModel):
    """`deploy.toml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    host: str  # where nodes connect: to the proxy, if there is one, else to the SuperLink
    port: int
    superlink: int | None = None  # port on 127.0.0.1 of a SuperLink behind a proxy
    test: bool = False
    nodes: list[DeployedNode]

    @property
    def local(self) -> str:
        """The SuperLink's own address: it listens only on this machine."""
        return f"127.0.0.1:{self.superlink or self.port}"


@dataclass(frozen=True)
class DeployedNodeFolder:
    """Files of one node under `path`."""

    path: Path

    @property
    def service(self) -> NodeFolder:
        """Policy, keys and ledger of its release service."""
        return NodeFolder(self.path / "service")

    @property
    def flower_key(self) -> Path:
        """Private key of its SuperNode; the public half is beside it, with `.pub`."""
        return self.path / "supernode.key"

    def secret(self, role: str) -> Path:
        """Secret shared by "supernode" and "executor": the same bytes in one file each, readable only by its user."""
        return self.path / f"{role}.secret"

    @property
    def flower_home(self) -> Path:
        """FLWR_HOME of its SuperNode."""
        return self.path / "flower"

    @property
    def ca(self) -> Path:
        """Certificate of the deployment's own authority."""
        return self.path / "ca.crt"

    def script(self, role: str) -> Path:
        """Script that starts one of its processes: "service", "supernode" or "executor"."""
        return self.path / f"start-{role}.sh"


@dataclass(frozen=True)
class SignerFolder:
    """Files of the process that signs questions."""

    path: Path

    @property
    def key_file(self) -> Path:
        """The key."""
        return self.path / "question.key"

    @property
    def runs(self) -> Path:
        """Registered runs."""
        return self.path / "runs"

    @property
    def signed_file(self) -> Path:
        """Record of signed questions."""
        return self.path / "signed.sqlite"

    @property
    def socket(self) -> Path:
        """The signer's socket; users with access to its folder may ask."""
        return self.path / "run" / "sign.sock"

    @property
    def script(self) -> Path:
        """Script that starts it."""
        return self.path / "start-signer.sh"

    def key(self) -> Ed25519PrivateKey:
        """The key that signs questions.

        Raises:
            RunError: missing or damaged.
        """
        try:
            return Ed25519PrivateKey.from_private_bytes(self.key_file.read_bytes())
        except (OSError, ValueError) as error:
            raise RunError(f"the key of questions {self.key_file} cannot be used: {error}") from error


@dataclass(frozen=True)
class DeploymentFolder:
    """Files of a deployment under `path`."""

    path: Path

    @classmethod
    def open(cls, path: Path) -> DeploymentFolder:
        """An existing deployment.

        Raises:
            RunError: not a deployment's folder.
        """
        folder = cls(path.resolve())
        if not folder.settings_file.is_file():
            raise RunError(
                f"{path} is not a deployment's folder (it has no deploy.toml); make one: fedlgm deploy init {path}"
            )
        if not folder.signer.path.is_dir():
            raise RunError(
                f"{path} was made by an earlier version of fedlgm, in which every ServerApp could read the key that "
                "signs questions: make a new deployment and enrol its nodes"
            )
        return folder

    @property
    def settings_file(self) -> Path:
        """Address, ports, names."""
        return self.path / "deploy.toml"

    @property
    def server(self) -> Path:
        """The server's own files."""
        return self.path / "server"

    @property
    def signer(self) -> SignerFolder:
        """The signer's files."""
        return SignerFolder(self.path / "signer")

    @property
    def proxy(self) -> Path:
        """The proxy's files, if there is a proxy."""
        return self.path / "proxy"

    @property
    def authority(self) -> Path:
        """The certificate authority's."""
        return self.path / "authority"

    @property
    def flower_home(self) -> Path:
        """FLWR_HOME of the server's operator: Flower's configuration."""
        return self.server / "flower"

    @property
    def enrolment_file(self) -> Path:
        """The client of every registered node."""
        return self.path / "enrolment.toml"

    @property
    def positions_file(self) -> Path:
        """Last known position of each node's ledger."""
        return self.server / "positions.json"

    @property
    def registered_file(self) -> Path:
        """Names of the nodes that the SuperLink knows."""
        return self.server / "registered"

    @property
    def runs(self) -> Path:
        """Run folders."""
        return self.server / "runs"

    @property
    def logs(self) -> Path:
        """Output of started processes."""
        return self.path / "logs"

    @property
    def processes_file(self) -> Path:
        """Processes that `up` has started."""
        return self.path / "processes.json"

    def settings(self) -> Settings:
        """`deploy.toml`.

        Raises:
            ConfigError: damaged.
        """
        try:
            return Settings.model_validate(tomllib.loads(self.settings_file.read_text(encoding="utf-8")))
        except (OSError, tomllib.TOMLDecodeError, ValidationError) as error:
            raise ConfigError(f"{self.settings_file} cannot be used: {error}") from error

    def write_settings(self, settings: Settings) -> None:
        """Write `deploy.toml`."""
        self.settings_file.write_text(tomli_w.dumps(settings.model_dump(exclude_none=True)), encoding="utf-8")

    def node(self, name: str) -> DeployedNodeFolder:
        """The folder of a node."""
        return DeployedNodeFolder(self.path / "nodes" / name)
