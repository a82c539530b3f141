"""The checks of `fedlgm node check`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from fedlgm.errors import FedlgmError
from fedlgm.files import explain_failure
from fedlgm_nodes.deploy.certificates import ending
from fedlgm_nodes.deploy.health import Health
from fedlgm_nodes.service.folder import NodeFolder


def checks(folder: Path) -> Iterator[tuple[str, bool, str]]:
    """The checks of a node's folder: for each check its name, whether it passed, and what it found.

    Raises:
        RunError: the folder is not a node's.
    """
    node = NodeFolder.open(folder)
    parts: dict[str, Callable[[NodeFolder], str]] = {
        "policy": _policy,
        "data": _data,
        "ledger and record": _ledger,
        "disk": _disk,
        "versions": _versions,
        "certificate": _certificate,
    }
    for name, part in parts.items():
        try:
            yield name, True, part(node)
        except (FedlgmError, ValueError) as error:
            yield name, False, str(error)
        except OSError as error:
            yield name, False, explain_failure("a file cannot be read", error)


def _policy(node: NodeFolder) -> str:
    policy = node.policy()
    policy.allow.check_names()
    who = "one server" if policy.ask.server_key else "ANYBODY, since ask.server_key is empty"
    return (
        f"epsilon {policy.privacy.epsilon:g} at delta {policy.privacy.delta:g}; answers {who}; new "
        f"work is approved by the {policy.ask.approval}"
    )


def _data(node: NodeFolder) -> str:
    from fedlgm_nodes.service import data

    policy = node.policy()
    return f"{len(data.read(policy.data, node.path))} examples"


def _ledger(node: NodeFolder) -> str:
    now = datetime.now(UTC).isoformat()
    with node.ledger(readonly=True) as ledger:
        record, rows = node.record(ledger.identity), ledger.rows()
        newest = max([row.charged_at for row in rows] + [row["at"] for row in record.rows] + [""])
    if newest > now:
        raise ValueError(
            f"the clock says {now[:19]}, but a row was written at {newest[:19]}: set the clock"
        )
    paused = "; PAUSED" if record.paused is not None else ""
    return f"{len(rows)} releases, {len(record.rows)} rows, all earlier than the clock{paused}"


def _disk(node: NodeFolder) -> str:
    health = Health()
    health.add_disk(node.path)
    if health.faults:
        raise ValueError(health.faults["disk"])
    return f"{health.figures['disk_free_bytes'] / 2**30:.1f} GiB are free"


def _versions(node: NodeFolder) -> str:
    from importlib.metadata import version

    from fedlgm_nodes.protocol.messages import PROTOCOL

    names = ("fedlgm", "torch", "flwr")
    return ", ".join(f"{name} {version(name)}" for name in names) + f", protocol {PROTOCOL}"


def _certificate(node: NodeFolder) -> str:
    file = node.path.resolve().parent / "ca.crt"
    if not file.is_file():
        return f"none at {file}"
    _, passed, said = ending(file)
    if passed:
        raise ValueError(said)
    return said
