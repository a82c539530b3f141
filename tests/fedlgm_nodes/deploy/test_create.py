"""Making a deployment's files, without starting anything."""

from __future__ import annotations

import configparser
import http.server
import os
import shlex
import shutil
import ssl
import stat
import subprocess
import threading
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from typer.testing import CliRunner

from fedlgm.errors import ConfigError, RunError
from fedlgm_nodes.deploy import certificates, deployment_status, submit
from fedlgm_nodes.deploy.create import create, enrol, secure_sums
from fedlgm_nodes.deploy.deployment_commands import app
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.flower_cli import Flower
from fedlgm_nodes.deploy.server_entry import recipe_for_nodes, work_of
from fedlgm_nodes.server.enrolment import Enrolment, key_digest
from fedlgm_nodes.service.folder import NodeFolder
from simulations.config import recipe as recipes
from simulations.engines.flower_processes import free_ports


@pytest.fixture
def folder(tmp_path: Path) -> DeploymentFolder:
    return create(tmp_path / "lab", 2, hosts=["fl.example.org", "10.0.0.7"], port=8443)


def test_certificates_name_every_host(folder):
    """Of the proxy, which nodes connect to; the SuperLink's own is for this machine."""
    certificate = x509.load_pem_x509_certificate((folder.server / "tls.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    certificate = x509.load_pem_x509_certificate((folder.proxy / "tls.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert [str(one) for one in names.get_values_for_type(x509.IPAddress)] == [
        "10.0.0.7",
        "127.0.0.1",
        "::1",
    ]
    authority = x509.load_pem_x509_certificate((folder.server / "ca.crt").read_bytes())
    certificate.verify_directly_issued_by(authority)
    ssl.create_default_context(cafile=str(folder.server / "ca.crt"))


def test_nothing_secret_can_be_read_by_others(folder):
    secret = [
        folder.server / "tls.key",
        folder.proxy / "tls.key",
        folder.authority / "ca.key",
        folder.signer.key_file,
    ]
    for node in ("node0", "node1"):
        files = folder.node(node)
        secret += [files.flower_key, files.secret("supernode"), files.secret("executor")]
        assert files.secret("supernode").read_bytes() == files.secret("executor").read_bytes()
    for file in secret:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    for closed in (folder.server, folder.proxy, folder.authority, folder.signer.runs):
        assert stat.S_IMODE(closed.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.server.iterdir()) == [
        "ca.crt", "flower", "runs", "start-superlink.sh", "tls.crt", "tls.key",
    ]  # fmt: skip  # what a ServerApp can read


def test_no_node_gets_a_noise_key(folder):
    """With it the server could take the noise off every answer: the node's service makes its
    own."""
    assert list(folder.path.rglob("noise.key")) == []


def test_every_node_is_enrolled_with_its_own_keys(folder):
    enrolment = Enrolment.load(folder.enrolment_file)
    assert len(enrolment) == 2
    for client in range(2):
        node = folder.node(f"node{client}")
        assert enrolment[client].service_key == node.service.public()["service_key"]
        public = node.flower_key.with_name("supernode.key.pub").read_bytes()
        assert enrolment[client].flower_key == key_digest(certificates.public_pem(public))
        load_ssh_private_key(node.flower_key.read_bytes(), None)
        assert node.service.policy().node.client == client
        assert node.service.policy().ask.server_key


def test_scripts_are_whole_and_nothing_in_them_is_of_the_draft(folder):
    files = [
        *folder.path.rglob("*.sh"),
        *folder.path.rglob("*.service"),
        folder.flower_home / "config.toml",
    ]
    assert len(files) == 9 + 9 + 1
    for file in files:
        text = file.read_text()
        assert ".draft" not in text
        if file.suffix == ".sh":
            assert os.access(file, os.X_OK)
            assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0
    settings = folder.settings()
    assert "--superlink fl.example.org:8443" in folder.node("node0").script("supernode").read_text()
    # Whatever its nodes are told, the SuperLink listens on this machine alone, and its operator
    # asks it there.
    assert settings.local == f"127.0.0.1:{settings.superlink}"
    assert (
        f"--host 127.0.0.1 --port {settings.superlink} "
        in (folder.server / "start-superlink.sh").read_text()
    )
    assert f'address = "{settings.local}"' in (folder.flower_home / "config.toml").read_text()


def test_systemd_takes_the_units_as_they_are(tmp_path):
    before = os.umask(0)
    try:
        folder = create(tmp_path / "a lab of 100%", 1)
    finally:
        os.umask(before)
    for path in (folder.path, *folder.path.rglob("*")):
        assert not path.lstat().st_mode & 0o022 or path.is_symlink(), f"others can write {path}"
    assert (
        not folder.proxy.exists()
    )  # with all nodes on this machine there is nothing that others need
    units = sorted((folder.path / "systemd").glob("*.service"))
    assert [unit.stem for unit in units] == [
        "fedlgm-node0-executor", "fedlgm-node0-service", "fedlgm-node0-supernode", "fedlgm-signer",
        "fedlgm-superlink",
    ]  # fmt: skip
    users = {}
    for unit in units:
        parsed = configparser.ConfigParser(strict=False, interpolation=None)
        parsed.optionxform = str  # type: ignore[assignment,method-assign]
        parsed.read(unit)
        assert parsed.sections() == ["Unit", "Service", "Install"]
        (start,) = shlex.split(parsed["Service"]["ExecStart"])
        assert os.access(start.replace("%%", "%"), os.X_OK)
        assert parsed["Service"]["NoNewPrivileges"] == "yes"
        users[unit.stem.rpartition("-")[2]] = parsed["Service"]["User"]
    # Three users, so that none of a node's processes can read what is another's.
    assert users == {
        "executor": "fl-app",
        "service": "fl-data",
        "supernode": "fl-node",
        "superlink": "fl-server",
        "signer": "fl-sign",
    }
    said = {unit.stem.rpartition("-")[2]: unit.read_text() for unit in units}
    assert [role for role, text in said.items() if "PrivateNetwork=yes" in text] == [
        "service",
        "signer",
    ]
    # It hides others from the unit that has it: the service, from those who talk to strangers.
    assert [role for role, text in said.items() if "ProtectProc=invisible" in text] == [
        "executor",
        "supernode",
    ]
    analyse = shutil.which("systemd-analyze")
    if analyse is None:
        pytest.skip(
            "the units were parsed; systemd-analyze, which checks every key, is not installed"
        )
    done = subprocess.run(
        [analyse, "verify", *map(str, units)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    broken = units[0].with_name("broken.service")
    broken.write_text(
        units[0]
        .read_text()
        .replace("NoNewPrivileges", "NoNewPrivilege")
        .replace("ExecStart", "Exec")
    )
    done = subprocess.run(
        [analyse, "verify", str(broken)], capture_output=True, text=True, check=False
    )
    assert "NoNewPrivilege" in done.stderr  # it does look


def test_a_node_that_makes_its_own_keys_is_enrolled(folder, tmp_path):
    own = NodeFolder.create(tmp_path / "own", {"name": "clinic", "client": 2, "population": 3})
    certificates.make_node_key(tmp_path / "key")
    entry = enrol(folder, own.public_file, tmp_path / "key.pub")
    enrolment = Enrolment.load(folder.enrolment_file)
    assert len(enrolment) == 3
    assert enrolment[2].name == "clinic"
    assert enrolment[2].service_key == own.public()["service_key"] == entry.service_key
    before = folder.enrolment_file.read_bytes()
    far = NodeFolder.create(tmp_path / "far", {"name": "far", "client": 7, "population": 8})
    with pytest.raises(ConfigError, match="client 7; the next new client is 3"):
        enrol(folder, far.public_file, tmp_path / "key.pub")
    with pytest.raises(
        ConfigError, match=r"own/public.toml is not the public key \(.pub\) of a SuperNode"
    ):
        enrol(folder, own.public_file, own.public_file)
    with pytest.raises(ConfigError, match=r"key.pub is not the public.toml of a node"):
        enrol(folder, tmp_path / "key.pub", tmp_path / "key.pub")
    assert folder.enrolment_file.read_bytes() == before


def test_an_enrolled_node_is_replaced_when_that_is_asked_for(folder, tmp_path):
    own = NodeFolder.create(tmp_path / "own", {"name": "clinic", "client": 1, "population": 2})
    certificates.make_node_key(tmp_path / "key")
    before = folder.enrolment_file.read_bytes()
    said = CliRunner().invoke(
        app, ["enrol", str(folder.path), str(own.public_file), str(tmp_path / "key.pub")]
    )
    assert isinstance(said.exception, ConfigError)
    assert "client 1 is node1 already" in str(said.exception)
    assert folder.enrolment_file.read_bytes() == before
    enrol(folder, own.public_file, tmp_path / "key.pub", replace=True)
    assert Enrolment.load(folder.enrolment_file)[1].name == "clinic"
    enrol(folder, own.public_file, tmp_path / "key.pub")  # the same node again changes nothing


@pytest.mark.parametrize("client", ["[1]", "true", "-1", "0.5"])
def test_a_nodes_number_is_named_with_its_file_if_it_is_none(folder, tmp_path, client):
    own = NodeFolder.create(tmp_path / "own", {"name": "clinic", "client": 2, "population": 3})
    certificates.make_node_key(tmp_path / "key")
    own.public_file.write_text(
        own.public_file.read_text().replace("client = 2", f"client = {client}")
    )
    with pytest.raises(ConfigError, match=r"own/public.toml: client"):
        enrol(folder, own.public_file, tmp_path / "key.pub", replace=True)


@pytest.mark.parametrize("name", ["clinic\\u001b[2J", "clinic\\nround 9: all is well", "../other"])
def test_a_nodes_name_holds_no_control_characters(folder, tmp_path, name):
    own = NodeFolder.create(tmp_path / "own", {"client": 2, "population": 3})
    certificates.make_node_key(tmp_path / "key")
    own.public_file.write_text(
        own.public_file.read_text().replace('name = "own"', f'name = "{name}"')
    )
    with pytest.raises(ConfigError, match="name: must be at most 64 letters") as error:
        enrol(folder, own.public_file, tmp_path / "key.pub")
    assert str(error.value).isprintable()


def test_a_recipes_own_module_is_looked_for_before_anything_starts(folder, tmp_path, monkeypatch):
    recipe = recipes.load("nodes", ["federation.server_optimizer=my_steps:Step"])
    with pytest.raises(ConfigError, match="no module 'my_steps'"):
        submit.run(folder, recipe)
    assert list(folder.runs.iterdir()) == []
    (tmp_path / "my_steps.py").write_text(
        "from strategies import ServerOptimizer\n\n\ndef Step(lr, momentum):\n    return "
        "ServerOptimizer('sgd', lr)\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="does not answer"):
        submit.run(folder, recipe)


def test_the_folder_of_a_deployed_node_is_named_for_the_one_around_it(folder):
    outer = folder.node("node0").service.path.parent
    with pytest.raises(RunError, match=r"is not a node's folder .*; did you mean .*service\?"):
        NodeFolder.open(outer)


@pytest.mark.parametrize(
    "host", ["https://fl.example.org", "fl.example.org:8443", "", "fl example", "a" * 65]
)
def test_a_host_is_a_name_or_an_address(tmp_path, host):
    with pytest.raises(ConfigError, match="--host takes a name or address"):
        create(tmp_path / "lab", 2, hosts=["::1", host])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("port", ["0", "-5", "99999"])
def test_a_port_is_one_that_a_superlink_can_listen_on(tmp_path, port):
    said = CliRunner().invoke(app, ["init", str(tmp_path / "lab"), "--port", port])
    assert said.exit_code == 2
    assert "is not in the range 1<=x<=65535" in said.output
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_policy_names_no_file_that_is_gone(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^the nodes' policy: privacy.trust.0: must be 'central', 'local'"
    ):
        create(tmp_path / "new", 1, example=None, policy={"trust": ["distribute"]})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_made_whole_or_not_at_all(folder, tmp_path):
    with pytest.raises(RunError, match="already exists"):
        create(folder.path, 2)
    with pytest.raises(ConfigError, match="at least 1"):
        create(tmp_path / "none", 0)
    with pytest.raises(ConfigError, match="unknown value"):
        create(tmp_path / "wrong", 2, policy={"budget": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lab"]
    with pytest.raises(RunError, match="fedlgm deploy init"):
        DeploymentFolder.open(tmp_path)


def test_example_nodes_share_a_recipes_data(tmp_path):
    import numpy as np

    folder = create(tmp_path / "lab", 3, example=recipes.load("nodes"))
    counts = []
    for name in ("node0", "node1", "node2"):
        with np.load(folder.node(name).path / "data" / "examples.npz") as arrays:
            counts.append(len(arrays["y"]))
            assert list(arrays["x"].shape[1:]) == list(
                folder.node(name).service.policy().data.shape
            )
    assert sum(counts) == 1442
    assert min(counts) > 400


def test_a_recipe_becomes_that_of_the_deployment():
    recipe = recipes.load("nodes", ["run.seed=7"])
    real, test = recipe_for_nodes(recipe, 5), recipe_for_nodes(recipe, 5, test=True)
    assert (real.federation.clients, real.run.seed, real.run.checkpoint_every) == (5, None, 1)
    assert (test.run.seed, test.run.test_mode) == (7, True)
    assert work_of(real)["model"] == {"name": "mlp", "hidden": [32], "activation": "tanh"}
    assert work_of(real)["mechanism"] == {"name": "snr-consistent", **real.mechanism.options}
    assert "exact_sums" not in work_of(real)
    exact = recipes.load("example-level-federation", ["training.exact_sums=true", "run.seed=none"])
    assert work_of(recipe_for_nodes(exact, 4))["exact_sums"]
    layers = recipes.load(
        "example-level-federation", ["mechanism.style=per-layer", "run.seed=none"]
    )
    assert work_of(recipe_for_nodes(layers, 4))["mechanism"]["style"] == "per-layer"
    for change, message in (
        ("federation.dropout=0.1", "simulated"), ("federation.stragglers=0.1", "simulated"),
        (["mechanism.clip=med", "mechanism.variant=published"], ("real nodes make only sound "
                                                                "releases")),
        ("data.standardise=test", "real nodes read their own rows, which this recipe does not"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            recipe_for_nodes(
                recipes.load("nodes", [change] if isinstance(change, str) else change), 5
            )
    with pytest.raises(ConfigError, match=r"needs run\.seed"):
        recipe_for_nodes(recipes.load("nodes", ["run.seed=none"]), 5, test=True)


def test_rounds_of_too_many_nodes_for_a_secure_sum():
    values = ["federation.clients=1200", "distributed.threshold=1100", "distributed.colluders=10"]
    recipe = recipes.load("distributed-digits", values)  # a simulation may have any number
    with pytest.raises(
        ConfigError,
        match=r"a round of 1200 real nodes: at most 1000 can make a secure sum\. Set a lower",
    ):
        recipe_for_nodes(recipe, 1200)
    part = recipe.with_values(federation={"rate": 0.5}, distributed={"threshold": 500})
    assert recipe_for_nodes(part, 1200).federation.share == 0.5
    assert secure_sums(1800)["min_cohort"] <= 1000
    with pytest.raises(
        ConfigError,
        match=r"each of 1900 nodes would require rounds of 1046 nodes or more \(min_cohort\)",
    ):
        secure_sums(1900)


def test_free_ports_are_different():
    assert len(set(free_ports(20))) == 20


def test_a_path_too_long_for_a_socket_is_refused_before_anything_is_made(tmp_path):
    far = tmp_path / ("a" * 90) / "lab"
    far.parent.mkdir()
    with pytest.raises(ConfigError, match="use a folder with a shorter path"):
        create(far, 2)
    assert list(far.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("ahead", "days", "reason"),
    [(0, 0, "certificate has expired"), (30, 825, "certificate is not yet valid")],
)
def test_a_certificate_of_another_time_is_named(tmp_path, monkeypatch, ahead, days, reason):
    """`up` waited for three minutes, and the command for a run said that the SuperLink does not
    answer."""

    class Clock(datetime):
        """The clock was set wrong when the deployment was made."""

        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=ahead)

    monkeypatch.setattr(certificates, "_DAYS", days)
    monkeypatch.setattr(certificates, "datetime", Clock)
    folder = create(tmp_path / "lab", 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder.server / "tls.crt", folder.server / "tls.key")
    with http.server.HTTPServer(
        ("127.0.0.1", folder.settings().local_port), http.server.SimpleHTTPRequestHandler
    ) as web:
        web.socket = context.wrap_socket(web.socket, server_side=True)
        web.handle_error = lambda *given: None
        threading.Thread(target=web.serve_forever, daemon=True).start()
        try:
            with pytest.raises(
                RunError, match=rf"SuperLink at .* \({reason}\): if this machine's clock is right"
            ):
                Flower(folder).healthy()
            assert reason in deployment_status.status(folder)["problem"]
        finally:
            web.shutdown()
