"""The page of a run of a federation, which the server writes after every round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from fedlgm.files import write_durably
from fedlgm_nodes.deploy.pages import render
from simulations.runs.folder import RunFolder
from simulations.runs.rows import FullRow

PAGE = "federation.html"  # among the run's private files, because it names each round's nodes


def write(
    folder: RunFolder,
    reports: Mapping[int, Mapping[str, Any]],
    releases: Mapping[str, int | None],
    faults: Iterable[str],
) -> None:
    """Write the page.

    Args:
        folder: the run's folder.
        reports: round -> report of its last attempt (see `RoundReport`).
        releases: name of each node -> releases in its ledger, as far as the server knows.
        faults: sentences about the faults of the server, for example a certificate that expires
            soon.
    """
    rounds, rows = folder.recipe().federation.rounds, folder.rows()
    shown = {row["round"]: _figures(row) for row in rows}
    lost = [(name, why) for report in reports.values() for name, why in report["lost"].items()]
    reasons, answered = dict(lost), [name for r in reports.values() for name in r["answered"]]
    nodes = [
        {"node": name, "answered": answered.count(name), "releases_in_its_ledger": known,
         "counted_as_zero": sum(name == other for other, _ in lost),
         "last_reason": reasons.get(name)}
        for name, known in releases.items()
    ]  # fmt: skip
    facts = {
        "run": folder.path.name,
        "made_at": datetime.now(UTC).isoformat(),
        "done": len(rows),
        "rounds": rounds,
        "figures": next(filter(None, map(_figures, reversed(rows))), ""),
        "faults": list(faults),
        "nodes": nodes,
        "reports": [
            {"round": number, "answered": ", ".join(report["answered"]),
             "counted_as_zero": ", ".join(report["lost"]),
             "seconds": f"{report['seconds']:.1f}", "figures": shown.get(number, "")}
            for number, report in sorted(reports.items(), reverse=True)
        ],
    }  # fmt: skip
    write_durably(folder.private / PAGE, render("federation.html", facts))


def _figures(row: FullRow) -> str:
    """The headline metric and the epsilon of a round as text; a value that the row does not have is
    omitted.
    """
    names = (row.get("headline", ""), "epsilon")
    values = {name: row.get(name) for name in names}
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items() if value is not None)
