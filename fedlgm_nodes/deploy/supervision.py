"""The processes of a deployment under a supervisor: units of systemd, and files of Docker Compose.

Both come from one list of processes. Each process has a user of its own, sees only its own files,
and may write only what it must. A process that holds keys or data has no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder, Settings

IMAGE = "fedlgm"
"""Name of the image that `containers/Dockerfile` describes."""
_HARDENED = """\
NoNewPrivileges=yes
CapabilityBoundingSet={capabilities}
ProtectSystem=strict
ReadWritePaths={writes}
CacheDirectory={name}
Environment=FEDLGM_CACHE=/var/cache/{name}
PrivateTmp=yes
PrivateDevices=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectControlGroups=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies={families}
LockPersonality=yes
MemoryMax={memory}
"""


@dataclass(frozen=True)
class Supervised:
    """One process of a deployment.

    Attributes:
        name: name of its unit.
        user: user who owns it.
        script: script that starts it.
        reads: files beside the script that it reads.
        writes: folders beside the script that it writes.
        network: whether it has a network. Without one it has Unix sockets only.
        shares: name of the process whose network it shares in containers; empty for its own.
        hides: whether the processes of other users are hidden from it.
        after: unit that starts before it; empty if there is none.
        memory: largest memory; empty for most of the machine's, if the amount of data decides.
        low_port: whether it may listen on a port below 1024.
    """

    name: str
    user: str
    script: Path
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    network: bool = True
    shares: str = ""
    hides: bool = False
    after: str = ""
    memory: str = "1G"
    low_port: bool = False

    def unit(self) -> str:
        """Its unit of systemd, with this machine's paths."""
        folder = self.script.parent
        writes = " ".join(_quote(folder / name) for name in self.writes)
        hardened = _HARDENED.format(
            capabilities="CAP_NET_BIND_SERVICE" if self.low_port else "",
            writes=writes,
            name=self.name,
            families="AF_UNIX AF_INET AF_INET6 AF_NETLINK" if self.network else "AF_UNIX",
            memory=self.memory or "75%",
        )
        return (
            f"[Unit]\nDescription={self.name}\nWants=network-online.target\n"
            "After=network-online.target\n"
            + (f"After={self.after}.service\n" if self.after else "")
            + f"\n[Service]\nUser={self.user}\nExecStart={_quote(self.script)}\n"
            "Restart=always\nRestartSec=5\n"
            + hardened
            + ("AmbientCapabilities=CAP_NET_BIND_SERVICE\n" if self.low_port else "")
            + ("" if self.network else "PrivateNetwork=yes\nUMask=0077\n")
            + ("ProtectProc=invisible\n" if self.hides else "")
            + "\n[Install]\nWantedBy=multi-user.target\n"
        )

    def service(self) -> str:
        """Its service in a Compose file that lies beside its script."""
        mounts = [f"./{name}:/node/{name}:ro" for name in (self.script.name, *self.reads)]
        mounts += [f"./{name}:/node/{name}" for name in self.writes]
        network = "none" if not self.network else f"service:{self.shares}" if self.shares else ""
        lines = [
            f"{self.name}:",
            f"  image: {IMAGE}",
            f'  command: ["/node/{self.script.name}"]',
            f"  user: {self.user}",
            *([f'  network_mode: "{network}"'] if network else []),
            "  read_only: true",
            "  tmpfs: [/tmp]",
            "  cap_drop: [ALL]",
            '  security_opt: ["no-new-privileges:true"]',
            *([f"  mem_limit: {self.memory.lower()}"] if self.memory else []),
            "  restart: unless-stopped",
            "  volumes:",
            *(f'    - "{mount}"' for mount in mounts),
        ]
        return "\n".join(f"  {line}" for line in lines) + "\n"


def server_processes(folder: DeploymentFolder, settings: Settings) -> list[Supervised]:
    """The server's processes: SuperLink, signer and, with nodes on other machines, the proxy."""
    processes = [
        Supervised(
            "fedlgm-superlink",
            "fl-server",
            folder.server / "start-superlink.sh",
            writes=(".",),
            after="fedlgm-signer",
            memory="",
        ),
        Supervised("fedlgm-signer", "fl-sign", folder.signer.script, writes=(".",), network=False),
    ]
    if settings.superlink is not None:
        script = folder.proxy / "start-proxy.sh"
        processes.append(
            Supervised("fedlgm-proxy", "fl-proxy", script, writes=(".",), low_port=True)
        )
    return processes


def node_processes(folder: DeploymentFolder, name: str, has_data: bool = False) -> list[Supervised]:
    """The three processes of a node, under three users.

    Args:
        folder: the deployment.
        name: name of the node.
        has_data: whether its data lie in the node's own folder, as an example's do.

    `ProtectProc` hides other users' processes from a unit: SuperNode and executor do not see the
    service, whose memory size reveals the amount of data. Containers hide them, too.
    """
    node = folder.node(name)
    unit = f"fedlgm-{name}"
    return [
        Supervised(
            f"{unit}-service",
            "fl-data",
            node.script("service"),
            reads=("data",) if has_data else (),
            writes=("service",),
            network=False,
            memory="",
        ),
        Supervised(
            f"{unit}-supernode",
            "fl-node",
            node.script("supernode"),
            reads=("ca.crt", "supernode.key", "supernode.secret"),
            writes=("flower",),
            hides=True,
        ),
        Supervised(
            f"{unit}-executor",
            "fl-app",
            node.script("executor"),
            reads=("executor.secret", "service/run"),
            shares=f"{unit}-supernode",
            hides=True,
            after=f"{unit}-service",
        ),
    ]


def write_units(draft: DeploymentFolder, final: DeploymentFolder, settings: Settings) -> None:
    """Write a unit for each process, and a Compose file into each node's folder.

    Args:
        draft: folder to write into.
        final: folder in which the files will lie.
        settings: the deployment's settings.
    """
    units = draft.path / "systemd"
    units.mkdir(exist_ok=True)
    nodes = {
        node.name: node_processes(
            final, node.name, has_data=(draft.node(node.name).path / "data").is_dir()
        )
        for node in settings.nodes
    }
    for process in chain(server_processes(final, settings), *nodes.values()):
        (units / f"{process.name}.service").write_text(process.unit(), encoding="utf-8")
    for name, processes in nodes.items():
        draft.node(name).compose_file.write_text(_compose(processes), encoding="utf-8")


def _compose(processes: Sequence[Supervised]) -> str:
    """The Compose file of a node."""
    return (
        "# docker compose up, in this folder. The image: containers/Dockerfile of fedlgm's source.\n"
        "# The service has no network. Mount the data that service/policy.toml names at the same\n"
        "# path, read-only, as a further line of the service's volumes: /srv/data:/srv/data:ro\n"
        "services:\n" + "\n".join(process.service() for process in processes)
    )


def _quote(path: Path) -> str:
    """A path as one word of a unit's line."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text}"'
