"""The commands of `fedlgm node` that approve work, pause the node, check it and report about it.
Every command reads the node's files, not its service.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedlgm.errors import ConfigError
from fedlgm.files import write_durably
from fedlgm.wire import printable
from fedlgm_nodes.deploy.node_commands import NodeArgument
from simulations.shell import JsonOption, print_json

_out = Console(soft_wrap=True, emoji=False)
DigestArgument = Annotated[
    str,
    typer.Argument(metavar="DIGEST", help="The request's digest, or at least its first 8 digits."),
]
ReasonOption = Annotated[str, typer.Option("--reason", help="The reason, for the record.")]


@contextmanager
def _open(folder: Path) -> Iterator[tuple[Any, Any, Any]]:
    """Open a node's folder, ledger and record, and verify ledger and record row by row."""
    from fedlgm_nodes.service.folder import NodeFolder

    node = NodeFolder.open(folder)
    owner = node.ledger_file.stat().st_uid
    if os.geteuid() != owner:  # the service could not read a file that another user has written
        raise ConfigError(f"run this command as the service's user (number {owner})")
    with node.ledger(readonly=True) as ledger:
        yield node, ledger, node.record(ledger.identity)


def _say(line: str) -> None:
    _out.print(line, markup=False, highlight=False)


def requests(folder: NodeArgument, as_json: JsonOption = False) -> None:
    """List the work that a server asked for, and whether it is approved."""
    with _open(folder) as (_, _, record):
        listed = [
            {"work": work, "state": record.state(work), "asked_at": row["at"],
             "model": row["content"]["model"]["name"],
             "mechanism": row["content"]["mechanism"]["name"]}
            for work, row in record.requests.items()
        ]  # fmt: skip
    if as_json:
        print_json(listed)
        return
    for row in listed:
        _say(
            f"{row['work'][:16]}  {row['state']}  {row['asked_at'][:19]}  "
            f"{printable(row['model'], 80)} by {printable(row['mechanism'], 80)}"
        )
    if not listed:
        _say("no requests")


def show(folder: NodeArgument, digest: DigestArgument) -> None:
    """Describe a request: what is trained on which columns, who asks, and its cost."""
    with _open(folder) as (node, ledger, record):
        request = record.find(digest)
        for line in _description(node.policy(), ledger, request):
            _say(line)
        _say(f"State: {record.state(request['work'])}.")


def _description(policy: Any, ledger: Any, request: dict[str, Any]) -> Iterator[str]:
    """The lines that describe a request to the operator."""
    from fedlgm import privacy
    from fedlgm_nodes.deploy.pages import counted
    from fedlgm_nodes.service.account import epsilon_of
    from fedlgm_nodes.service.row import protected

    content, budget, data = request["content"], policy.privacy, request["data"]
    facts, layers = request["facts"], request["layers"]
    stated = int(facts.get("max_participations") or facts["rounds"] or 1)
    rounds = min(stated, policy.ask.releases)
    event = privacy.events.decode(request["cost"])
    cost = epsilon_of(request["cost"], rounds, budget.delta)
    spent = ledger.epsilon(budget.delta, protected(budget))
    columns = ", ".join(data["features"]) or f"all inputs, of shape {data['shape']}"
    yield f"Work {request['work']}, first asked for at {request['at'][:19]} UTC."
    yield f"Asked by: {request['asked_by'] or 'anybody (the policy names no server_key)'}."
    yield (
        f"It trains the model {_words(content['model'])} ({sum(layers.values()):,} parameters in "
        f"{counted(len(layers), 'layer')}) for the task {_words(content['task'])}."
    )
    yield f"Data: {printable(data['name'], 200)}; columns: {printable(columns, 2000)}."
    yield f"Mechanism: {_words(content['mechanism'])}; training: {_words(content['training'])}."
    protects = "one example" if budget.unit == "example" else "all of this node's data"
    if budget.nodes > 1:
        protects = f"a person at up to {budget.nodes} nodes together"
    yield (
        f"The server states {counted(stated, 'round')} under {facts['trust']} trust; this node's policy allows "
        f"{rounds} of them at most. They cost an epsilon of "
        f"{cost:.4g} at delta {budget.delta:g} for {protects}: {cost / budget.epsilon:.1%} of the "
        f"budget of {budget.epsilon:g}, of which {spent:.4g} is spent."
    )
    told = privacy.attack_rates(event, steps=rounds).sentence(budget.units)
    yield f"{told[0].upper()}{told[1:]}."


def _words(section: dict[str, Any]) -> str:
    """A name and its options as text."""
    return printable(", ".join(f"{key} = {value}" for key, value in section.items()), 2000)


def approve(
    folder: NodeArgument,
    digest: DigestArgument,
    epsilon: Annotated[
        float | None, typer.Option(help="Epsilon that this work may cost, at the budget's delta.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="Last day of the approval (UTC), such as 2027-12-31.")
    ] = None,
    purpose: Annotated[str, typer.Option(help="The purpose, for the record.")] = "",
) -> None:
    """Let requested work run; any change of the work is another request."""
    from fedlgm_nodes.deploy.pages import counted
    from fedlgm_nodes.service.account import affordable

    if until is not None:
        try:
            last = date.fromisoformat(until)
        except ValueError:
            raise ConfigError(f"--until takes a day such as 2027-12-31, got {until!r}") from None
        if last < datetime.now(UTC).date():
            raise ConfigError(f"--until {last} has passed: give a day from today on")
        until = last.isoformat()
    with _open(folder) as (node, _, record):
        request, releases = record.find(digest), None
        if epsilon is not None:
            if not epsilon > 0:
                raise ConfigError(f"--epsilon must be positive, got {epsilon}")
            budget = node.policy().privacy
            if epsilon > budget.epsilon:
                raise ConfigError(f"--epsilon {epsilon:g} exceeds the budget of {budget.epsilon:g}")
            releases = affordable(request["cost"], epsilon, budget.delta)
            if not releases:
                raise ConfigError(f"--epsilon {epsilon:g} is less than one release costs")
        record.append(
            "approve", work=request["work"], epsilon=epsilon, until=until, releases=releases,
            purpose=purpose,
        )  # fmt: skip
    limit = "" if releases is None else f" for at most {counted(releases, 'release')}"
    _say(f"approved {request['work'][:16]}{limit}{f' until {until}' if until else ''}")


def deny(folder: NodeArgument, digest: DigestArgument, reason: ReasonOption = "") -> None:
    """Refuse requested work, even if it was approved before."""
    with _open(folder) as (_, _, record):
        request = record.find(digest)
        record.append("deny", work=request["work"], reason=reason)
    _say(f"denied {request['work'][:16]}")


def pause(folder: NodeArgument, reason: ReasonOption = "") -> None:
    """Make no release until `fedlgm node resume`; the service keeps running."""
    with _open(folder) as (_, _, record):
        record.append("pause", reason=reason)
    _say("paused: the next question is refused; a release that has begun is completed")


def resume(folder: NodeArgument) -> None:
    """End a pause."""
    with _open(folder) as (_, _, record):
        record.append("resume")
    _say("resumed")


def reload(folder: NodeArgument) -> None:
    """Let the running service enforce an edited policy.toml, from the next question on."""
    from fedlgm_nodes.service.account import Account

    with _open(folder) as (node, ledger, record):
        policy = node.policy()
        if "values" not in record.policy:
            raise ConfigError("the service has not started yet, and reads policy.toml when it does")
        policy.check_reload(record.policy["values"])
        policy.allow.check_names()
        Account(
            policy, ledger
        )  # raises an error if no amount of noise keeps a release within the budget
        before = record.policy["seq"]
        node.note_policy(record, policy)
    changed = "reloaded" if record.policy["seq"] != before else "nothing has changed"
    _say(f"{changed}: epsilon {policy.privacy.epsilon:g}, {policy.ask.releases} releases")


def verify(folder: NodeArgument, as_json: JsonOption = False) -> None:
    """Verify each row of ledger and record, and that they state the same releases."""
    from fedlgm_nodes.deploy.pages import counted
    from fedlgm_nodes.deploy.record_report import compared

    with _open(folder) as (_, ledger, record):
        facts = compared(ledger, record)
    if as_json:
        print_json(facts)
        return
    _say(
        f"as this node wrote them: {counted(facts['releases'], 'release')} in the ledger and "
        f"{counted(facts['rows'], 'row')} in the record; "
        f"{counted(len(facts['unrecorded']), 'release')} without a row in the record (charged "
        "before the record existed, or never answered)"
    )


def report(
    folder: NodeArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML page to write.")] = Path(
        "node-report.html"
    ),
    as_json: JsonOption = False,
) -> None:
    """Write one page for a data protection officer: releases, cost, decisions and refusals."""
    from fedlgm_nodes.deploy.record_report import facts_of, page

    with _open(folder) as (node, ledger, record):
        facts = facts_of(node.policy(), ledger, record)
    if as_json:
        print_json(facts)
        return
    write_durably(output, page(facts))
    _say(f"wrote {output}")


def check(folder: NodeArgument, as_json: JsonOption = False) -> None:
    """Check policy, data, ledger, record, clock, disk, versions and certificates."""
    from fedlgm_nodes.deploy.record_checks import checks

    lines = list(checks(folder))
    if as_json:
        print_json([{"check": name, "ok": ok, "said": said} for name, ok, said in lines])
    else:
        for name, ok, said in lines:
            _say(f"{'ok    ' if ok else 'FAULT '} {name}: {said}")
    if not all(ok for _, ok, _ in lines):
        raise typer.Exit(1)


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this file to `fedlgm node`."""
    for command in (requests, show, approve, deny, pause, resume, reload, verify, report, check):
        app.command()(command)
