"""The status of a deployment: its processes on this machine, its nodes and its runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedlgm.errors import RunError
from fedlgm_nodes.deploy import process_record
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.flower_cli import Flower, is_online
from fedlgm_nodes.deploy.process_faults import faults
from fedlgm_nodes.deploy.processes import hello

_OF_SERVICE = ("epsilon_spent", "epsilon", "delta", "releases_left", "test")


def status(folder: DeploymentFolder) -> dict[str, Any]:
    """The running processes, the connected nodes, the remaining budget of each node, and the runs,
    as plain values.

    In each entry of `nodes`, `service`, `supernode` and `executor` tell whether these processes run
    on this machine; `online` tells whether the SuperLink counts the node as connected (None if the
    node's SuperNode has no id yet). `since` is the UTC time at which the node connected or
    disconnected (None if it has never been connected). The figures that come from the service count
    all releases of the data set since its ledger was created. They are None if the service does not
    answer, and `problem` then gives the reason.
    """
    settings, running, flower = (
        folder.settings(),
        process_record.all_running(folder),
        Flower(folder),
    )
    wrong = faults(folder)
    try:
        healthy, problem = flower.healthy(), "does not answer"
    except RunError as error:
        healthy, problem = False, str(error)
    listed = flower.nodes() if healthy else {}
    nodes = []
    for node in settings.nodes:
        fault = wrong.get(f"{node.name}-service")  # a greeting would wait for a stopped service
        answer = hello(folder, node.name) if fault is None else {"why": fault}
        entry = listed.get(process_record.node_id(folder, f"{node.name}-supernode"), {})
        online = is_online(entry) if entry else None
        since = entry.get("online-at" if online else "offline-at")
        nodes.append(
            {
                "name": node.name,
                **{
                    role: f"{node.name}-{role}" in running
                    for role in ("service", "supernode", "executor")
                },
                "online": online,
                "since": since if since != "N/A" else None,
                **{figure: answer.get(figure) for figure in _OF_SERVICE},
                "problem": None if answer.get("ok") else str(answer.get("why")),
            }
        )
    return {
        "address": f"{settings.host}:{settings.port}",
        "superlink": healthy,
        "problem": None if healthy else problem,
        "connected": sum(map(is_online, listed.values())),
        "nodes": nodes,
        "faults": list(wrong.values()),
        "runs": [_run(path.parent) for path in sorted(folder.runs.glob("*/recipe.toml"))],
    }


def _run(path: Path) -> dict[str, Any]:
    from simulations.runs.folder import RunFolder

    run = RunFolder(path)
    result = run.result()
    return {"run": path.name, "rounds": len(run.rows()), "finished": result is not None}
