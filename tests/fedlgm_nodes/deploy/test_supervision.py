"""A node's processes as containers: what its Compose file says, and the same restrictions on plain
processes, since a test cannot start containers everywhere."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedlgm_nodes.deploy import process_record, processes, submit
from fedlgm_nodes.deploy.create import create
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.supervision import server_processes
from simulations.config import recipe as recipes

ROLES = ("service", "supernode", "executor")
RECIPE = [
    "model.hidden=[8]",
    "training.epochs=1",
    "federation.rounds=1",
    "privacy.max_participations=1",
]
CONTAINERS = Path(__file__).parents[3] / "containers"


def containers(folder: DeploymentFolder, name: str) -> dict[str, Any]:
    text = folder.node(name).compose_file.read_text()
    services = yaml.safe_load(text)["services"]
    return {role: services[f"fedlgm-{name}-{role}"] for role in ROLES}


def mounts(container: dict[str, Any], place: str = "/node") -> dict[str, bool]:
    """File or folder of the node, and whether the container may write it."""
    parts = [mount.split(":") for mount in container["volumes"]]
    for part in parts:
        assert part[1] == part[0].replace(".", place, 1)
    return {part[0].removeprefix("./"): part[2:] != ["ro"] for part in parts}


def test_a_container_has_what_its_process_needs_and_nothing_else(tmp_path: Path) -> None:
    folder = create(tmp_path / "lab", 2, example=recipes.load("nodes"))
    for name in ("node0", "node1"):
        services = containers(folder, name)
        for container in services.values():
            assert container["read_only"]
            assert container["cap_drop"] == ["ALL"]
            assert container["security_opt"] == ["no-new-privileges:true"]
            for file in mounts(container):
                assert (folder.node(name).path / file).exists()
        assert len({container["user"] for container in services.values()}) == 3
        service, supernode, executor = services.values()
        assert service["network_mode"] == "none"
        assert executor["network_mode"] == f"service:fedlgm-{name}-supernode"
        # Only the service sees data, keys and ledger; only the SuperNode its Flower key.
        assert mounts(service) == {"start-service.sh": False, "data": False, "service": True}
        assert set(mounts(executor)) == {"start-executor.sh", "executor.secret", "service/run"}
        assert not any(mounts(executor).values())
        assert {file for file, writes in mounts(supernode).items() if writes} == {"flower"}


def server_containers(folder: DeploymentFolder) -> dict[str, Any]:
    return dict(yaml.safe_load(folder.compose_file.read_text())["services"])


def test_a_servers_container_has_what_its_process_needs_and_nothing_else(tmp_path: Path) -> None:
    folder = create(tmp_path / "lab", 1, hosts=["fl.example.org"], port=8443)
    services = server_containers(folder)
    seen: dict[str, set[str]] = {}
    for name, container in services.items():
        assert container["read_only"]
        assert container["cap_drop"] == ["ALL"]
        parts = [mount.split(":") for mount in container["volumes"]]
        assert all(part[1] == str(folder.path / part[0]) for part in parts)
        assert all((folder.path / part[0]).exists() for part in parts)
        assert Path(container["command"][0]).is_file()
        seen[name] = {part[0] for part in parts if part[2:] != ["ro"]}
    link, signer, proxy = services.values()
    assert list(seen.values()) == [{"./server"}, {"./signer"}, {"./proxy"}]
    assert signer["network_mode"] == "none"
    assert link["ports"] == ["8443:8443"]
    assert proxy["network_mode"] == "service:fedlgm-superlink"
    # The SuperLink, which runs code of others, sees the signer's socket and not its key.
    assert f"./signer/run:{folder.path}/signer/run:ro" in link["volumes"]
    assert not create(tmp_path / "alone", 1).compose_file.exists()


def test_data_elsewhere_are_for_the_operator_to_mount(tmp_path: Path) -> None:
    folder = create(tmp_path / "lab", 1)
    assert "data" not in mounts(containers(folder, "node0")["service"])
    assert "/srv/data:/srv/data:ro" in folder.node("node0").compose_file.read_text()


def test_the_image_has_the_users_of_the_compose_files(tmp_path: Path) -> None:
    folder = create(tmp_path / "lab", 1)
    image = (CONTAINERS / "Dockerfile").read_text()
    proxied = create(tmp_path / "proxied", 1, hosts=["fl.example.org"], port=8443)
    for container in (*containers(folder, "node0").values(), *server_containers(proxied).values()):
        assert f" {container['user']} " in image.replace("\n", " ")
    hadolint = shutil.which("hadolint")
    if hadolint is not None:
        subprocess.run([hadolint, CONTAINERS / "Dockerfile"], check=True)


# -- a run under the same restrictions --------------------------------------------------------------------


def restricted(container: dict[str, Any], node: Path, place: str = "/node") -> str:
    """Beginning of a command that runs as the Compose file says: a read-only root, but for the
    folders that it may write, and its network."""
    writable = [node / file for file, writes in mounts(container, place).items() if writes]
    steps = ["mount -t tmpfs tmpfs /tmp"]
    steps += [
        f"mount --bind {shlex.quote(str(path))} {shlex.quote(str(path))}" for path in writable
    ]
    steps += ["mount -o remount,ro,bind /", 'cd "$PWD"', 'exec "$@"']
    alone = ["--net"] if container.get("network_mode") == "none" else []
    return shlex.join(
        ["unshare", "--map-root-user", "--mount", *alone, "sh", "-ec", "\n".join(steps), "sh"]
    )


@pytest.fixture(scope="module")
def lab() -> Iterator[DeploymentFolder]:
    if any(path.startswith("/tmp/") for path in (sys.prefix, str(CONTAINERS))):
        pytest.skip("this checkout lies in /tmp, which the restricted processes do not see")
    place = Path(tempfile.mkdtemp(prefix="fedlgm-", dir="/var/tmp"))
    tried = {"volumes": [], "network_mode": "none"}
    if subprocess.run([*shlex.split(restricted(tried, place)), "true"], check=False).returncode:
        shutil.rmtree(place)
        pytest.skip("this machine allows no mount and network namespaces (unshare)")
    folder = create(
        place / "lab", 1, example=recipes.load("nodes", RECIPE), policy={"epsilon": 60.0}
    )
    node = folder.node("node0")
    for role, container in containers(folder, "node0").items():
        script = node.script(role)
        before = f"exec {restricted(container, node.path)} "
        script.write_text(script.read_text().replace("exec ", before))
    for server in server_processes(folder, folder.settings()):
        text, place = server.service(folder.path, str(folder.path)), str(folder.path)
        before = f"exec {restricted(yaml.safe_load(text)[server.name], folder.path, place)} "
        server.script.write_text(server.script.read_text().replace("exec ", before))
    try:
        processes.up(folder)
        yield folder
    finally:
        processes.down(folder)
        shutil.rmtree(place)


@pytest.mark.slow
def test_a_restricted_node_answers_a_restricted_server(lab: DeploymentFolder) -> None:
    assert submit.run(lab, recipes.load("nodes", RECIPE))["rounds"] == 1
    with lab.node("node0").service.ledger(readonly=True) as ledger:
        assert len(ledger.rows()) == 1
    ours = os.readlink("/proc/self/ns/net")
    for role, (pid, *_) in process_record.read(lab).items():
        process = Path("/proc") / str(pid)
        alone = role in ("node0-service", "signer")
        assert (os.readlink(process / "ns" / "net") != ours) == alone
        roots = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
        (options,) = [parts[5] for parts in roots if parts[4] == "/"]
        assert options.split(",")[0] == "ro"
