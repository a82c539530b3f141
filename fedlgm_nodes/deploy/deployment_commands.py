"""`fedlgm deploy`: the commands of a server's operator."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedlgm.errors import ConfigError
from fedlgm_nodes.deploy.node_commands import (
    AlertOption,
    ApprovalOption,
    EveryOption,
    MetricsOption,
    OverlapOption,
    PeopleOption,
    TestRowsOption,
    WatchOption,
)
from simulations.shell import (
    Commands,
    JsonOption,
    NamedRecipeArgument,
    NewFolderArgument,
    SetOption,
    TestSeedOption,
    expand_home,
    print_json,
)
from simulations.tables import table

if TYPE_CHECKING:
    from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder

app = typer.Typer(
    cls=Commands,
    help="Create, start, run and stop federations of real nodes.",
    no_args_is_help=True,
)
_out = Console(highlight=False, soft_wrap=True, emoji=False)
_err = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)

INCOMPLETE = 1
"""Exit status of a run with void rounds, which left the model unchanged, or with missing answers of
a node.
"""

# The users of a deployment's processes may pass through its folder, and need not be able to list
# it.
FolderArgument = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="The deployment's folder.", readable=False, callback=expand_home
    ),
]


@app.command()
def init(
    folder: NewFolderArgument,
    nodes: Annotated[
        int | None, typer.Option(help="Number of nodes, if there is no --data; default: 3.")
    ] = None,
    example: Annotated[
        str,
        typer.Option(
            help="Recipe whose data are divided among the nodes. With 'none', you edit the nodes' "
            "policies."
        ),
    ] = "nodes",
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Examples of one node: a file or a folder of images. Give this option "
            "once for each node."
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Column to predict, if the data are tables.")
    ] = None,
    test: TestRowsOption = None,
    people: PeopleOption = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--host", help="Name or address under which nodes reach the server; repeatable."
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of the SuperLink; by default a free port."),
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="Budget in every node's policy.")] = None,
    unit: Annotated[
        str | None,
        typer.Option(
            help="Unit that the budgets protect: client (all of a node's data) or example."
        ),
    ] = None,
    trust: Annotated[
        str | None,
        typer.Option(
            help="Trust model in every policy, which says who may add the noise: local, "
            "central or distributed."
        ),
    ] = None,
    overlap: OverlapOption = None,
    approval: ApprovalOption = "policy",
    test_seed: TestSeedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a deployment: certificates, keys, Flower configuration, scripts, systemd units,
    nodes.
    """
    from fedlgm_nodes.deploy import own_data
    from fedlgm_nodes.deploy.create import create
    from simulations.config import recipe as recipes

    if data and nodes not in (None, len(data)):
        raise ConfigError(f"--nodes {nodes}: --data is given {len(data)} times, once for each node")
    described = [
        own_data.describe(file, labels=target, public=test, people=people) for file in data or ()
    ]
    nodes = len(described) or nodes or 3
    shared = None if described or example == "none" else recipes.load(example)
    given: dict[str, Any] = {"epsilon": epsilon, "unit": unit, "overlap": overlap}
    given |= {"trust": None if trust is None else [trust], "approval": approval}
    policy = {name: value for name, value in given.items() if value is not None}
    deployment = create(
        folder,
        nodes,
        example=shared,
        own=described,
        hosts=hosts or (),
        port=port,
        policy=policy,
        test_seed=test_seed,
    )
    stated = bool(described) and own_data.agree(described)
    if stated:
        recipe = own_data.recipe_text(described[0] | policy, test)
        (deployment.path / "recipe.toml").write_text(recipe, encoding="utf-8")
    settings = deployment.settings()
    if as_json:
        print_json(
            {
                "folder": str(deployment.path),
                "address": f"{settings.host}:{settings.port}",
                "nodes": nodes,
            }
        )
        return
    _out.print(
        f"made {deployment.path} for https://{settings.host}:{settings.port} and {nodes} nodes",
        markup=False,
    )
    next_step = (
        f"fedlgm deploy up {folder}"
        if shared is not None or described
        else f"edit {deployment.path}/nodes/*/service/policy.toml"
    )
    _out.print(f"next: {next_step}", markup=False)
    if stated:
        _out.print(f"then: fedlgm deploy run {folder}/recipe.toml {folder}", markup=False)


@app.command()
def enrol(
    folder: FolderArgument,
    public: Annotated[Path, typer.Argument(metavar="PUBLIC", help="The node's public.toml.")],
    key: Annotated[
        Path,
        typer.Argument(
            metavar="KEY.pub",
            help="Public key of the node's SuperNode, in the format of ssh-keygen.",
        ),
    ],
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Replace the node that currently has this client number."),
    ] = False,
) -> None:
    """Enrol a node that created its own keys."""
    from fedlgm_nodes.deploy.create import enrol as add

    entry = add(_open(folder), public, key, replace=replace)
    _out.print(
        f"client {entry.client} is {entry.name}; register its SuperNode with flwr supernode "
        "register",
        markup=False,
    )


SwitchOption = Annotated[
    bool,
    typer.Option("--switch", help="The second step: use the new authority or key from now on."),
]


@app.command()
def renew(folder: FolderArgument, switch: SwitchOption = False) -> None:
    """Renew the server's certificates; nodes accept the next authority in addition to the present
    one.
    """
    from fedlgm_nodes.deploy import life

    _print_lines(life.renew(_open(folder), switch=switch))


@app.command("rotate-keys")
def rotate_keys(folder: FolderArgument, switch: SwitchOption = False) -> None:
    """Replace the key that signs questions; nodes accept the next key in addition to the present
    one.
    """
    from fedlgm_nodes.deploy import life

    _print_lines(life.rotate_keys(_open(folder), switch=switch))


@app.command()
def add(
    folder: FolderArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new node.")],
    data: Annotated[
        Path | None, typer.Option(help="The node's examples: a file or a folder of images.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Column to predict, if the data are a table.")
    ] = None,
    test: TestRowsOption = None,
    people: PeopleOption = None,
    epsilon: Annotated[float, typer.Option(help="Budget in the node's policy.")] = 8.0,
    unit: Annotated[
        str, typer.Option(help="Unit that the budget protects: client or example.")
    ] = "client",
    overlap: OverlapOption = None,
    approval: ApprovalOption = "policy",
) -> None:
    """Add a node, with the next client number."""
    from fedlgm_nodes.deploy import life, own_data

    described = (
        {} if data is None else own_data.describe(data, labels=target, public=test, people=people)
    )
    values = {"epsilon": epsilon, "unit": unit, "overlap": overlap, "approval": approval}
    client = life.add(_open(folder), name, described | values)
    _out.print(f"{name} is client {client}; start it: fedlgm deploy up {folder}", markup=False)


@app.command()
def remove(
    folder: FolderArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the node.")],
) -> None:
    """Take a node out of the federation; its folder and ledger are kept."""
    from fedlgm_nodes.deploy import life

    place = life.remove(_open(folder), name)
    _out.print(f"{name} no longer takes part; its files are in {place}", markup=False)


@app.command()
def up(
    folder: FolderArgument,
    supervise: Annotated[
        bool,
        typer.Option(
            "--supervise",
            help="Keep running, restart processes that end, and rotate the logs; `down` stops the "
            "processes.",
        ),
    ] = False,
) -> None:
    """Start the SuperLink and all nodes on this machine; running processes are kept."""
    from fedlgm_nodes.deploy import processes

    processes.up(_open(folder), _say)
    _print_lines(_endings(_open(folder)))
    if supervise:
        from fedlgm_nodes.deploy.restarts import Supervisor

        Supervisor(_open(folder), _say).run()


@app.command()
def status(
    folder: FolderArgument,
    as_json: JsonOption = False,
    watch: WatchOption = False,
    every: EveryOption = 10.0,
    metrics: MetricsOption = "",
    alert_command: AlertOption = "",
) -> None:
    """Show the processes, the connected nodes and the remaining budget of every node.

    The exit status is 1 if a process that `up` started has ended or is stopped, or if the SuperLink
    does not answer.
    """
    from fedlgm_nodes.deploy import deployment_status

    if watch:
        from fedlgm_nodes.deploy import health

        look = partial(health.look_at_deployment, _open(folder))
        health.watch(look, every=every, address=metrics, command=alert_command)
    report = deployment_status.status(_open(folder))
    if as_json:
        print_json(report)
    else:
        _show(report)
        _print_lines(_endings(_open(folder)))
    if report["faults"] or not report["superlink"]:
        raise typer.Exit(1)


def _endings(folder: DeploymentFolder) -> list[str]:
    """A line for each certificate of the server that ends soon."""
    from fedlgm_nodes.deploy.health import Health

    health = Health()
    health.add_certificates(folder)
    return list(dict.fromkeys(health.faults.values()))


def _show(report: dict[str, Any]) -> None:
    """Print what `deployment_status.status` has found."""
    from clients.flower_private import HEARTBEAT_S
    from fedlgm_nodes.server.round import join_names

    state = (
        f"answers and counts {report['connected']} nodes as connected"
        if report["superlink"]
        else report["problem"]
    )
    _out.print(f"SuperLink at {report['address']}: {state}", markup=False)
    columns = (
        "node",
        "service",
        "supernode",
        "executor",
        "connected (UTC)",
        "epsilon spent",
        "releases left",
    )
    nodes = table(None, columns, left=columns)
    for node in report["nodes"]:
        spent = (
            "?"
            if node["epsilon_spent"] is None
            else f"{node['epsilon_spent']:.4g} of {node['epsilon']:g}"
        )
        left = "?" if node["releases_left"] is None else str(node["releases_left"])
        running = [
            "yes" if up else "no" for up in (node["service"], node["supernode"], node["executor"])
        ]
        connected = {
            None: "?",
            True: f"since {node['since']}",
            False: f"not since {node['since']}",
        }[node["online"]]
        connected = "never" if node["online"] is not None and node["since"] is None else connected
        nodes.add_row(node["name"], *running, connected, spent, left)
    _out.print(nodes, soft_wrap=False)
    for node in report["nodes"]:
        if node["service"] and node["problem"]:
            _out.print(
                f"{node['name']}: its service answers no questions: {node['problem']}", markup=False
            )
    gone = [node["name"] for node in report["nodes"] if node["online"] and not node["supernode"]]
    if gone:
        _out.print(
            f"{join_names(gone)}: none of the SuperNodes that `up` started runs here; the SuperLink "
            "counts a killed SuperNode as connected until it has heard nothing from it for "
            f"{2 * HEARTBEAT_S} s",
            markup=False,
        )
    for run_ in report["runs"]:
        _out.print(
            f"{run_['run']}: {run_['rounds']} rounds{', finished' if run_['finished'] else ''}",
            markup=False,
        )
    for fault in report["faults"]:
        _out.print(fault, markup=False)


@app.command()
def register(
    recipe: NamedRecipeArgument,
    folder: FolderArgument,
    overrides: SetOption = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Register another run of this recipe.")
    ] = False,
) -> None:
    """Register a recipe's run, so that the signer signs its questions; run this as the signer's
    user.

    `deploy run` registers the run if its user may write the signer's files.
    """
    from fedlgm_nodes.deploy import submit
    from simulations.config import recipe as recipes

    name = submit.register(_open(folder), recipes.load(recipe, overrides or ()), fresh=fresh)
    _out.print(f"registered {name}", markup=False)


@app.command()
def run(
    recipe: NamedRecipeArgument,
    folder: FolderArgument,
    overrides: SetOption = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start another run of this recipe.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a recipe on the nodes; repeat the command to continue an interrupted run. The exit status
    is 1 if a round was void, or if the answer of a node is missing in a round that asked it.
    """
    from fedlgm_nodes.deploy import submit
    from fedlgm_nodes.deploy.server_entry import NodesRecord
    from simulations.config import recipe as recipes
    from simulations.runs.folder import RunFolder
    from simulations.summaries import terminal

    result = submit.run(_open(folder), recipes.load(recipe, overrides or ()), fresh=fresh, say=_say)
    if as_json:
        print_json(result)
    else:
        _out.print(terminal.summary(result), soft_wrap=False)
    record = NodesRecord.of(RunFolder.open(result["run"]))
    if record.void() or record.silent():
        raise typer.Exit(INCOMPLETE)


@app.command()
def down(folder: FolderArgument) -> None:
    """Stop all processes that `up` started on this machine."""
    from fedlgm_nodes.deploy import processes

    stopped = processes.down(_open(folder))
    _out.print(f"stopped {stopped} processes" if stopped else "nothing was running", markup=False)


def _open(path: Path) -> DeploymentFolder:
    from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder

    return DeploymentFolder.open(path)


def _print_lines(lines: list[str]) -> None:
    for line in lines:
        _out.print(line, markup=False)


def _say(line: str) -> None:
    _err.print(line, markup=False)
