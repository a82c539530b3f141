"""The processes of a deployment under a supervisor: units of systemd, and files of Docker Compose.

Units and Compose files come from the same list of processes. Each process has a user of its own,
sees only its own files, and may write only the files that it must write. A process that holds keys
or data has no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder, Settings

_PUBLIC = ("deploy.toml", "enrolment.toml")  # read by `deploy run` and `deploy register`
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
        reads: files that it reads, in the folder of its script.
        public: other files of the deployment that it reads.
        writes: folders in which it writes, in the folder of its script.
        network: whether it has a network. Without a network it has only Unix sockets.
        shares: name of the process whose network it shares in containers; empty if it has its own
            network.
        hides: whether the processes of other users are hidden from it.
        after: unit that starts before it; empty if there is none.
        memory: limit of the process's memory. It is empty if the need depends on the amount of
            data; most of the machine's memory is then allowed.
        low_port: whether it may listen on a port below 1024.
        port: port on which its container can be reached; 0 for none.
    """

    name: str
    user: str
    script: Path
    reads: tuple[str, ...] = ()
    public: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    network: bool = True
    shares: str = ""
    hides: bool = False
    after: str = ""
    memory: str = "1G"
    low_port: bool = False
    port: int = 0

    def unit(self) -> str:
        """The process's unit of systemd, with this machine's paths."""
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

    def service(self, root: Path, place: str) -> str:
        """The process's service in a Compose file.

        Args:
            root: folder of that file.
            place: path of this folder in the container.
        """
        own = self.script.parent.relative_to(root)
        script = [] if "." in self.writes else [self.script.name]
        reads = [*(own / name for name in (*script, *self.reads)), *map(Path, self.public)]
        mounts = [f"./{path}:{place}/{path}:ro" for path in reads]
        mounts += [f"./{own / name}:{place}/{own / name}" for name in self.writes]
        network = "none" if not self.network else f"service:{self.shares}" if self.shares else ""
        lines = [
            f"{self.name}:",
            f"  image: {IMAGE}",
            f'  command: ["{place}/{own / self.script.name}"]',
            f"  user: {self.user}",
            *([f'  network_mode: "{network}"'] if network else []),
            "  read_only: true",
            "  tmpfs: [/tmp]",
            *([f'  ports: ["{self.port}:{self.port}"]'] if self.port else []),
            "  cap_drop: [ALL]",
            *(["  cap_add: [NET_BIND_SERVICE]"] if self.low_port else []),
            '  security_opt: ["no-new-privileges:true"]',
            *([f"  mem_limit: {self.memory.lower()}"] if self.memory else []),
            "  restart: unless-stopped",
            "  logging: {driver: local}",  # this driver rotates the log
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
            public=(*_PUBLIC, "signer/run"),
            writes=(".",),
            after="fedlgm-signer",
            memory="",
            port=0 if settings.superlink is None else settings.port,
        ),
        Supervised(
            "fedlgm-signer",
            "fl-sign",
            folder.signer.script,
            public=_PUBLIC,
            writes=(".",),
            network=False,
        ),
    ]
    if settings.superlink is not None:
        processes.append(
            Supervised(
                "fedlgm-proxy",
                "fl-proxy",
                folder.proxy / "start-proxy.sh",
                writes=(".",),
                shares="fedlgm-superlink",
                low_port=True,
            )
        )
    return processes


def node_processes(folder: DeploymentFolder, name: str, has_data: bool = False) -> list[Supervised]:
    """The three processes of a node, under three users.

    Args:
        folder: the deployment.
        name: name of the node.
        has_data: whether the node's data are in the node's own folder, as with `--example`.

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
    """Write a unit for each process, a Compose file into each node's folder and, if nodes are on
    other machines, a Compose file for the server.

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
    server = server_processes(final, settings)
    if settings.superlink is not None:
        place = str(final.path)  # Flower's configuration names this path
        text = _SERVER.format(folder=place) + _services(server, final.path, place)
        draft.compose_file.write_text(text, encoding="utf-8")
    for process in chain(server, *nodes.values()):
        (units / f"{process.name}.service").write_text(process.unit(), encoding="utf-8")
    for name, processes in nodes.items():
        draft.node(name).compose_file.write_text(
            _NODE + _services(processes, final.node(name).path, "/node"), encoding="utf-8"
        )


_NODE = """\
# docker compose up, in this folder. The image: containers/Dockerfile of fedlgm's source.
# The service has no network. Mount the data that service/policy.toml names at the same
# path, read-only, as a further line of the service's volumes: /srv/data:/srv/data:ro
"""
_SERVER = """\
# docker compose up, in this folder. The image: containers/Dockerfile of fedlgm's source.
# Mount a recipe of your own, read-only, into fedlgm-signer and fedlgm-superlink. Then:
#   docker compose exec fedlgm-signer fedlgm deploy register RECIPE {folder}
#   docker compose exec fedlgm-superlink fedlgm deploy run RECIPE {folder}
"""


def _services(processes: Sequence[Supervised], root: Path, place: str) -> str:
    return "services:\n" + "\n".join(process.service(root, place) for process in processes)


def _quote(path: Path) -> str:
    """A path as one word of a unit's line."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text}"'
