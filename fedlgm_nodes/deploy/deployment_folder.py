"""A deployment's folder: the files of the server's operator and the files of each node.

DIR/deploy.toml                address, ports, names
DIR/enrolment.toml             which node is which client
DIR/server/                    SuperLink's certificate and database, Flower's configuration, runs
DIR/signer/                    the key that signs questions, and registered runs; its user is not
                               the SuperLink's
DIR/proxy/                     the proxy before the SuperLink, if nodes are on other machines
DIR/authority/                 the key that signs certificates; no running process needs it
DIR/nodes/NAME/                everything of one node, which goes to its machine
DIR/systemd/                   units for machines that start the processes themselves
DIR/logs/, DIR/processes.json  logs and record of the processes that `fedlgm deploy up` started
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tomli_w
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel, ConfigDict, ValidationError

from fedlgm.errors import ConfigError, RunError
from fedlgm.files import Under, explain_failure, read_toml
from fedlgm_nodes.service.folder import NodeFolder


class DeployedNode(BaseModel):
    """One node of `deploy.toml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    port: int  # port of its SuperNode's Runtime API, on the node's own machine


class Settings(BaseModel):
    """`deploy.toml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    host: str  # host to which nodes connect: the proxy's if there is a proxy, else the SuperLink's
    port: int
    superlink: int | None = None  # the port on 127.0.0.1 where a SuperLink behind a proxy listens
    test: bool = False
    nodes: list[DeployedNode]

    @property
    def local_port(self) -> int:
        """The port on 127.0.0.1 on which the SuperLink listens."""
        return self.superlink or self.port

    @property
    def local(self) -> str:
        """The address on which the SuperLink listens; it can be reached only from this machine."""
        return f"127.0.0.1:{self.local_port}"


@dataclass(frozen=True)
class DeployedNodeFolder:
    """Files of one node under `path`."""

    path: Path

    @property
    def service(self) -> NodeFolder:
        """Policy, keys and ledger of its release service."""
        return NodeFolder(self.path / "service")

    flower_key = Under("supernode.key")
    """Private key of the node's SuperNode; the public half is in the file with the suffix
    `.pub`.
    """

    def secret(self, role: str) -> Path:
        """The file of the secret that a "supernode" and its "executor" share. Each of the two roles
        has a file with the same bytes, which only the role's user can read.
        """
        return self.path / f"{role}.secret"

    flower_home = Under("flower")
    """FLWR_HOME of its SuperNode."""
    ca = Under("ca.crt")
    """Certificate of the deployment's own authority."""
    compose_file = Under("compose.yaml")
    """The node's processes as containers."""

    def script(self, role: str) -> Path:
        """Script that starts one of the node's processes: "service", "supernode" or "executor"."""
        return self.path / f"start-{role}.sh"


@dataclass(frozen=True)
class SignerFolder:
    """Files of the process that signs questions."""

    path: Path

    key_file = Under("question.key")
    """The key."""
    next_key_file = Under("next.key")
    """The key that will replace the present key."""
    runs = Under("runs")
    """Registered runs."""
    signed_file = Under("signed.sqlite")
    """Record of signed questions."""
    socket = Under("run/sign.sock")
    """The signer's socket; users with access to its folder may ask."""
    script = Under("start-signer.sh")
    """Script that starts it."""

    def key(self, file: Path | None = None) -> Ed25519PrivateKey:
        """The key that signs questions, or another key in a file.

        Raises:
            RunError: the key is missing or damaged.
        """
        file = file or self.key_file
        try:
            return Ed25519PrivateKey.from_private_bytes(file.read_bytes())
        except (OSError, ValueError) as error:
            raise RunError(
                explain_failure(f"the key of questions {file} cannot be used", error)
            ) from error


@dataclass(frozen=True)
class DeploymentFolder:
    """Files of a deployment under `path`."""

    path: Path

    @classmethod
    def open(cls, path: Path) -> DeploymentFolder:
        """An existing deployment.

        Raises:
            RunError: the folder is not a deployment's.
        """
        folder = cls(path.resolve())
        if not folder.settings_file.is_file():
            raise RunError(
                f"{path} is not a deployment's folder (it has no deploy.toml); make one: fedlgm "
                f"deploy init {path}"
            )
        return folder

    settings_file = Under("deploy.toml")
    """Address, ports, names."""
    server = Under("server")
    """The server's own files."""

    @property
    def signer(self) -> SignerFolder:
        """The signer's files."""
        return SignerFolder(self.path / "signer")

    proxy = Under("proxy")
    """The proxy's files, if there is a proxy."""
    authority = Under("authority")
    """The files of the certificate authority."""
    flower_home = Under("server/flower")
    """FLWR_HOME of the server's operator: Flower's configuration."""
    enrolment_file = Under("enrolment.toml")
    """File that states which node is which client."""
    positions_file = Under("server/positions.json")
    """Last known position of each node's ledger."""
    registered_file = Under("server/registered")
    """Names of the nodes that the SuperLink knows."""
    runs = Under("server/runs")
    """Run folders."""
    logs = Under("logs")
    """Output of started processes."""
    compose_file = Under("compose.yaml")
    """The server's processes as containers."""
    processes_file = Under("processes.json")
    """Processes that `up` has started."""

    def settings(self) -> Settings:
        """`deploy.toml`.

        Raises:
            ConfigError: the file is damaged.
        """
        try:
            return Settings.model_validate(read_toml(self.settings_file))
        except ValidationError as error:
            raise ConfigError(f"{self.settings_file} cannot be used: {error}") from error

    def write_settings(self, settings: Settings) -> None:
        """Write `deploy.toml`."""
        self.settings_file.write_text(
            tomli_w.dumps(settings.model_dump(exclude_none=True)), encoding="utf-8"
        )

    def node(self, name: str) -> DeployedNodeFolder:
        """The folder of a node."""
        return DeployedNodeFolder(self.path / "nodes" / name)
