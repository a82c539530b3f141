"""`fedlgm node`: the commands of a node's operator."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.text import Text

from fedlgm.errors import ConfigError
from fedlgm.privacy.guarantee import Guarantee, Relation, Unit
from fedlgm.wire import printable
from fedlgm_nodes.deploy.listening import listener_fault
from simulations.shell import (
    Commands,
    JsonOption,
    NewFolderArgument,
    TestSeedOption,
    expand_home,
    print_json,
)
from simulations.tables import table

app = typer.Typer(
    cls=Commands, help="Create, run and inspect a node's release service.", no_args_is_help=True
)
_out = Console(soft_wrap=True, emoji=False)

_OF_RELEASE = ("seq", "charged_at", "run", "round", "trust", "protects", "event")
TestRowsOption = Annotated[
    Path | None,
    typer.Option(
        "--test",
        help="Public rows of a table. They give the classes and the figures that standardise the "
        "columns.",
    ),
]
PeopleOption = Annotated[
    str | None,
    typer.Option(
        help="Column of a table with people's pseudonyms; elsewhere.txt in the node's folder "
        "lists the people whose rows other nodes use."
    ),
]
OverlapOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Largest number of nodes at which one person has rows; releases are charged for all "
        "of them.",
    ),
]
ApprovalOption = Annotated[
    str, typer.Option(help="Who admits new work: the policy, or the operator (node approve).")
]
WatchOption = Annotated[
    bool, typer.Option("--watch", help="Keep looking; alerts are JSON lines on stderr.")
]
EveryOption = Annotated[float, typer.Option(help="With --watch: seconds between two looks.")]
MetricsOption = Annotated[
    str,
    typer.Option(
        help="With --watch: port of 127.0.0.1, or path of a socket, that serves /ready and "
        "/metrics."
    ),
]
AlertOption = Annotated[
    str, typer.Option(help="With --watch: command that reads each alert on its standard input.")
]
NodeArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="The node's folder.", callback=expand_home)
]


@app.command()
def init(
    folder: NewFolderArgument,
    client: Annotated[int, typer.Option(help="This node's number in the federation, from 0.")] = 0,
    population: Annotated[
        int | None,
        typer.Option(
            help="Registered clients of the federation; by default the client's number plus one."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the node; by default the folder's name.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="The examples: CSV, Parquet, .npz, .npy, IDX, or a folder of images."),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            "--target",
            "--labels",
            help="Labels: a column (csv, parquet) or a file (npy, idx).",
        ),
    ] = None,
    test: TestRowsOption = None,
    people: PeopleOption = None,
    kind: Annotated[
        str | None, typer.Option(help="Kind of data: numpy, images, idx, csv, parquet or loader.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Shape of one input, for example 1,28,28.")
    ] = None,
    classes: Annotated[int | None, typer.Option(help="Number of classes.")] = None,
    epsilon: Annotated[float, typer.Option(help="Budget for the lifetime of the data set.")] = 8.0,
    delta: Annotated[float, typer.Option(help="Delta of the budget.")] = 1e-5,
    unit: Annotated[
        str,
        typer.Option(help="Unit that the budget protects: client (all of the data) or example."),
    ] = "client",
    overlap: OverlapOption = None,
    server_key: Annotated[
        str, typer.Option(help="Public key of the server; the node then answers no one else.")
    ] = "",
    approval: ApprovalOption = "policy",
    test_seed: TestSeedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a node's folder: commented policy, keys, empty ledger."""
    from fedlgm_nodes.deploy.own_data import describe
    from fedlgm_nodes.service.folder import NodeFolder

    values: dict[str, Any] = {
        "client": client,
        "population": client + 1 if population is None else population,
        "unit": unit,
        "overlap": overlap,
        "epsilon": epsilon,
        "delta": delta,
        "server_key": server_key,
        "approval": approval,
    }
    values |= {"name": name} if name else {}
    if kind == "loader":
        values |= {"kind": kind, "path": "", "loader": str(data or "package.module:function")}
    if shape is not None:
        if not re.fullmatch(r"\d+(,\d+)*", shape):
            raise ConfigError(f"--shape takes sizes such as 64 or 1,28,28, got {shape!r}")
        values["shape"] = [int(size) for size in shape.split(",")]
    if classes is not None:
        values["classes"] = classes
    if data is not None and kind != "loader":
        given = {key: values[key] for key in ("shape", "classes") if key in values}
        values |= describe(data, kind=kind, labels=labels, public=test, people=people, **given)
    elif kind != "loader":
        stated = {"kind": kind, "labels": labels}
        values |= {key: value for key, value in stated.items() if value is not None}
    NodeFolder(folder).check_length()
    node = NodeFolder.create(folder, values, test_seed=test_seed)
    if as_json:
        print_json({"folder": str(folder), **node.public()})
        return
    _out.print(
        f"made {folder}: read and edit {node.policy_file}, then `fedlgm node serve {folder}`",
        markup=False,
    )
    _out.print(
        f"send {node.public_file} to the server's operator; back up {folder / 'state'} as a whole",
        markup=False,
    )


@app.command()
def serve(folder: NodeArgument) -> None:
    """Answer questions about this node's data within its policy, until stopped."""
    from fedlgm_nodes.service.listener import run

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    run(folder)


@app.command()
def status(
    folder: NodeArgument,
    as_json: JsonOption = False,
    watch: WatchOption = False,
    every: EveryOption = 10.0,
    metrics: MetricsOption = "",
    alert_command: AlertOption = "",
) -> None:
    """Show whether the service answers, and the remaining budget."""
    from fedlgm.errors import RunError
    from fedlgm_nodes.protocol import frames
    from fedlgm_nodes.protocol import messages as protocol
    from fedlgm_nodes.service.folder import NodeFolder

    node = NodeFolder.open(folder)
    if watch:
        from fedlgm_nodes.deploy import health

        health.watch(health.NodeLook(node), every=every, address=metrics, command=alert_command)
    try:
        if why := listener_fault(node.socket):
            raise RunError(why)
        answer, _ = frames.exchange(str(node.socket), protocol.HELLO, b"", timeout=60)
    except frames.NoService as error:
        answer = {"ok": False, "why": f"{error}, or start it: fedlgm node serve {folder}"}
    except RunError as error:
        answer = {"ok": False, "why": str(error)}
    if as_json:
        print_json(answer)
    elif answer.get("ok"):
        note = ". FOR TESTS, NOT PRIVATE" if answer["test"] else ""
        _out.print(
            f"{answer['name']}: client {answer['client']} of {answer['population']}, epsilon "
            f"{answer['epsilon_spent']:.4g} of {answer['epsilon']:g} spent at delta "
            f"{answer['delta']:g} for "
            f"{'each example' if answer.get('unit') == 'example' else 'all of its data'}, "
            f"{answer['releases_left']} releases left{note}",
            markup=False,
        )
    else:
        state = f"refuses ({answer['code']})" if "code" in answer else "not answering"
        _out.print(f"{state}: {answer.get('why')}", markup=False)
    if not answer.get("ok"):
        raise typer.Exit(1)


def _guarantee(trust: set[str], protected: str) -> Guarantee:
    """Guarantee of a node's releases, by the noising party and the protected unit."""
    one, _, several = protected.partition(" at ")
    unit, relation = cast(tuple[Unit, Relation], one.split(", "))
    from fedlgm.planning.trust import weakest

    kind = weakest(trust)
    guarantee = Guarantee(*kind.answers, relation, kind.name, unit)
    if not several:
        return guarantee
    return guarantee.conditional_on(
        f"conditional on nobody having rows at more than {several}, at all of which together "
        "epsilon holds if no other of them makes more or dearer releases"
    )


@app.command()
def ledger(folder: NodeArgument, as_json: JsonOption = False) -> None:
    """Show the releases of the data set and the remaining budget, verified row by row."""
    from fedlgm.privacy.cost import Cost
    from fedlgm.privacy.events import decode
    from fedlgm_nodes.service.folder import NodeFolder
    from fedlgm_nodes.service.row import protected

    node = NodeFolder.open(folder)
    policy = node.policy()
    with node.ledger(readonly=True) as node_ledger:
        kind = protected(policy.privacy)
        rows, spent = node_ledger.rows(), node_ledger.epsilon(policy.privacy.delta, kind)
        guarantee = _guarantee({row.trust for row in rows}, kind)
        report: dict[str, Any] = {
            "data": node_ledger.dataset,
            "ledger": node_ledger.identity,
            "test": node_ledger.test,
            "releases": len(rows),
            "head": node_ledger.head,
            "epsilon_spent": spent,
            "epsilon": policy.privacy.epsilon,
            "epsilon_left": max(0.0, policy.privacy.epsilon - spent),
            "delta": policy.privacy.delta,
            "releases_left": max(0, policy.ask.releases - len(rows)),
            "unit": guarantee.unit,
            "relation": guarantee.relation,
            "trust": sorted({row.trust for row in rows}),
            "guarantee": guarantee.sentence(noise_reproducible=node_ledger.test),
            "noise_reproducible": node_ledger.test,
            "runs": dict(Counter(row.run for row in rows)),
            "rows": [{name: getattr(row, name) for name in _OF_RELEASE} for row in rows],
        }
    if as_json:
        print_json(report)
        return
    columns = ("release", "charged at", "run", "round", "trust", "cost")
    last = table(f"{policy.node.name}: {report['data']}", columns, left=columns)
    for row in rows[-20:]:
        cost = Cost.of(decode(json.loads(row.event))).sentence(guarantee.unit)
        # chosen by the sender of the question: no markup, no control characters
        run = Text(printable(row.run, 80))
        last.add_row(str(row.seq), row.charged_at[:19], run, str(row.round), row.trust, cost)
    _out.print(last, soft_wrap=False)
    _out.print(
        f"epsilon {spent:.4g} of {policy.privacy.epsilon:g} spent at delta "
        f"{policy.privacy.delta:g}, "
        f"{report['epsilon_left']:.4g} left; "
        f"{report['releases_left']} of {policy.ask.releases} releases left; "
        f"head {node_ledger.head[:16]}\n{report['guarantee']}",
        markup=False,
    )
    if node_ledger.test:
        _out.print("FOR TESTS, NOT PRIVATE: the noise of these releases is known", markup=False)


@app.command()
def certify(
    folder: NodeArgument,
    out: Annotated[Path, typer.Option(help="File to write.", callback=expand_home)] = Path(
        "node-certificate.json"
    ),
) -> None:
    """Sign a statement of the node's ledger, which `fedlgm verify` checks without the ledger."""
    from fedlgm.files import write_whole
    from fedlgm_nodes.service.certificate import certify_node
    from fedlgm_nodes.service.folder import NodeFolder

    node = NodeFolder.open(folder)
    content = certify_node(node)
    write_whole(out, lambda path: path.write_bytes(content))
    _out.print(
        f"wrote {out}; check it: fedlgm verify {out} --key {node.public()['service_key']}",
        markup=False,
    )
