"""Progress bars and tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from simulations.config.recipe import Recipe
from simulations.progress import progress as bar
from simulations.runs.headline import headline, is_evaluated, measured_figures
from simulations.runs.rows import FullRow, OnRound, RunSummary
from simulations.summaries.report_types import (
    ClientRow,
    EventGroup,
    Exported,
    LedgerReport,
    PlanReport,
)
from simulations.tables import facts, table

OF_Z = " (of z)"
"""Note on sigma_j if noise is correlated over rounds: a round's own noise is larger (see
`round_sigma`)."""


@contextmanager
def progress(recipe: Recipe, shown: bool = True) -> Iterator[OnRound]:
    """Progress bar on standard error, with rounds, the task's headline metric, spent epsilon and
    remaining time.
    """
    rounds, figures = recipe.federation.rounds, "starting"
    with bar(recipe.name, shown, rounds) as on_progress:

        def on_round(row: FullRow) -> None:
            nonlocal figures
            if "loss" in row:
                name, value = headline(row)
                figures = f"{name} {value:.3f}  epsilon {number(row['epsilon'])}"
            on_progress(row["round"], rounds, figures)

        yield on_round


def number(value: float) -> str:
    """A printed figure, in which infinity stays infinity."""
    return "inf" if math.isinf(value) else f"{value:.4g}"


def summary(result: RunSummary) -> Group:
    """Final table, with claimed and proven figures."""
    run = f"{result['recipe']}  ({result['mechanism']}, {result['variant']}; engine {result['engine']})"
    pace = f"  ({result['seconds_per_round']:.3f} s each)" if "seconds_per_round" in result else ""
    (label, first), *further = measured_figures(result)
    if is_evaluated(result):
        first = f"[bold]{first}[/bold]  (loss {result['loss']:.4f})"
    rows = facts(
        [
            ("recipe", escape(run)),
            ("rounds", f"{result['rounds']}{pace}"),
            (escape(label), first),
            *((escape(label), text) for label, text in further),
            *_epsilon_rows(result),
            *attack_rows(result),
        ]
    )
    if "readers_epsilon" in result:
        rows.add_row("epsilon of readers", number(result["readers_epsilon"]))
    if "audited_epsilon" in result:
        rows.add_row("epsilon audited", _audit_text(result))
    rows.add_row("guarantee", escape(result["guarantee"]))
    rows.add_row("noise multiplier", f"{result['noise_multiplier']:.4f}")
    rows.add_row("noise drawn by", f"{result['noise_backend']}; trained on {result['device']}")
    rows.add_row("model sha256", result["model_sha256"])
    if result.get("ledger_head"):
        rows.add_row("ledger head", result["ledger_head"])
    for node, count in (result.get("failures") or {}).items():
        rows.add_row("failed replies", f"{node}: {count}")
    rows.add_row("run folder", escape(result["run"]))
    if "report" in result:
        rows.add_row("report", escape(result["report"]))
    return Group(Panel(rows, title="fedlgm", title_align="left", expand=False))


def export_table(written: Exported) -> Table:
    """An export's file with its guarantee."""
    beside = [("metadata", escape(written["metadata_file"]))] if written["metadata_file"] else []
    return facts(
        [
            ("file", escape(f"{written['file']}  ({written['bytes']:,} bytes)")),
            *beside,
            _epsilon_row(written),
            *attack_rows(written),
            ("guarantee", escape(written["guarantee"])),
            ("model sha256", written["model_sha256"]),
        ]
    )


def epsilon_label(status: str) -> str:
    """Label of an accountant's epsilon under a guarantee of this status. Without a guarantee
    epsilon is infinite.
    """
    return "epsilon conditional" if status == "conditional" else "epsilon proven"


def _epsilon_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    claimed = f"{number(result['claimed_epsilon'])}  at delta {result['delta']:g}"
    return [("epsilon claimed", claimed), _epsilon_row(result)]


def _epsilon_row(result: Mapping[str, Any]) -> tuple[str, str]:
    figure = f"[bold]{number(result['epsilon'])}[/bold]  at delta {result['delta']:g}"
    return epsilon_label(result["guarantee_status"]), figure


def attack_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What epsilon means for an attacker. Runs of earlier versions do not state this."""
    return [("that is", escape(result["attack"]))] if "attack" in result else []


def _audit_text(result: Mapping[str, Any]) -> str:
    how = f"({result['audit_method']}, confidence {result['audit_confidence']:g})"
    bound = f"at least {number(result['audited_epsilon'])}  {how}"
    return bound if result["audit_passed"] else f"[bold red]{bound}: NOT AS REPORTED[/bold red]"


def application(result: Mapping[str, Any]) -> Panel:
    """Figures of an application: the spending, then the diagnostics of a simulation."""
    figures = result["diagnostics"]
    names = ("objective", "optimum", "relative_error", "recovery_error", "variance_kept")
    rows = facts(
        [
            ("data", f"{result['data']}: {result['rows']:,} rows over {result['clients']} clients"),
            ("method", result.get("method") or f"{result['rule']}, {result['family']}"),
            *_epsilon_rows(result),
            ("guarantee", escape(result["guarantee"])),
            *(
                (f"{name.replace('_', ' ')} *", number(figures[name]))
                for name in names
                if name in figures
            ),
            ("", "* compared with the data themselves: not released, not private"),
        ]
    )
    if "run" in result:
        rows.add_row("folder", result["run"])
    return Panel(rows, title=result["application"], title_align="left", expand=False)


def layer_cells(row: Mapping[str, Any]) -> list[str]:
    """Cells of a layer in a table of a plan."""
    cells = [str(row["layer"]), f"{row['size']:,}", f"{row['clip']:.5g}"]
    if not row["released"]:
        return [*cells, "not released", "-", "-", "-"]
    return [
        *cells,
        f"{row['sigma']:.5g}",
        f"{row['share']:.4f}",
        f"{row['snr']:.3e}",
        number(row["noise_norm"]),
    ]


def plan_table(report: PlanReport) -> Group:
    """Layers of a plan, then the cost of the whole run."""
    scale = f"; sigma_j{OF_Z}" if report.get("correlated") else ""
    columns = ("layer", "d_j", "s_j", "sigma_j", "share p_j", "SNR_j", "noise norm on the mean")
    layers = table(
        f"{report['recipe']}: one round of {report['mechanism']}{scale}", columns, left=("layer",)
    )
    for row in report["layers"]:
        layers.add_row(*map(escape, layer_cells(row)))
    if len(report["layers"]) > 1:
        total = f"{report['parameters']:,}"
        layers.add_row(
            "all",
            total,
            f"{report['bound']:.5g}",
            "",
            "1",
            "",
            f"{report['noise_norm']:.4g}",
            style="bold",
        )
    cost = facts([("noise multiplier", f"{report['noise_multiplier']:.6f}")])
    cost.add_row("rounds", f"{report['rounds']}, {report['sampling']}")
    if "stated" in report:
        cost.add_row("data", report["stated"])
    for name, epsilon in report["epsilons"].items():
        unknown = math.isinf(epsilon) and min(report["epsilons"].values()) < math.inf
        stated = f"{number(epsilon)} at delta {report['delta']:g}"
        cost.add_row(
            f"epsilon ({name.upper()})",
            "this accountant has no bound for these releases" if unknown else stated,
        )
    for name, text in attack_rows(report):
        cost.add_row(name, text)
    if "shares" in report:
        for name, text in _shares(report):
            cost.add_row(name, text)
    if "noise_process" in report:
        cost.add_row("noise", report["noise_process"])
    cost.add_row("guarantee", escape(report["guarantee"]))
    return Group(layers, *([_noise_table(report)] if "noise_process" in report else ()), cost)


def _shares(report: PlanReport) -> list[tuple[str, str]]:
    """Table of a plan whose noise is added in shares."""
    shares = report["shares"]
    asked, threshold, colluders, bits = (
        int(shares[name]) for name in ("asked", "threshold", "colluders", "bits")
    )
    return [
        (
            "epsilon of readers",
            f"{number(report['readers_epsilon'])} (of released models; the server's is above)",
        ),
        (
            "nodes",
            f"{asked} asked, {threshold} must answer, {colluders} may collude with the server",
        ),
        ("words", f"{bits} bits, {shares['bits_needed']:.0f} needed"),
        ("wrap-around", f"with probability {shares['wrap_probability']:.1e} in a round"),
        (
            "noise",
            (
                f"{shares['noise_over_central']:.3f} times that of a trusted server at the same "
                "epsilon"
            ),
        ),
    ]


def _noise_table(report: PlanReport) -> Table:
    """Noise of some rounds and of the model after them, in comparison with independent noise."""
    heads = {
        "round": "round",
        "single": "one round",
        "so_far": "model",
        "same_schema": "independent",
        "sampled": "independent, secret draws",
    }
    shown = [key for key in heads if key in report["noise_over_rounds"][0]]
    grid = table(
        "noise norm, all layers: of one round's mean, and of the model so far",
        [heads[key] for key in shown],
        [[number(row[key]) for key in shown] for row in report["noise_over_rounds"]],
    )
    grid.add_row("all, rms", "", *map(number, report["error_of_the_model"].values()), style="bold")
    return grid


def ledger_table(report: LedgerReport) -> Group:
    """Charges, then totals."""
    totals = "".join(f"{note}\n" for note in report["notes"]) + (
        f"epsilon charged {number(report['epsilon'])}, claimed {number(report['claimed_epsilon'])} "
        f"at delta {report['delta']:g} ({report['accountant']} accountant, budget "
        f"{report['budget']:g})\n"
        "verified: rows follow from each other and from the recipe, and agree with "
        f"{report['anchors']} heads kept in "
        f"checkpoints and result\nledger head {report['ledger_head']}{worst_off(report['clients'])}"
    )
    totals += f"\n{report['attack']}"
    if report["guarantee"]:
        totals += f"\n{escape(report['guarantee'])}"
    return Group(charges_table(report["run"], report["events"]), totals)


def charges_table(of: str, events: Sequence[EventGroup]) -> Table:
    """Charges of a ledger, one line per kind."""
    words = ("what was released", "noise", "sampling")
    charges = table(f"ledger of {of}", ["rounds", "releases", *words], left=words)
    for row in events:
        by = f" by {row['clients']} clients" if row["clients"] else ""
        charges.add_row(
            row["rounds"],
            f"{row['count']}{by}",
            *(escape(row[key]) for key in ("released", "noise", "sampling")),
        )
    return charges


def worst_off(clients: Sequence[ClientRow]) -> str:
    """A line on the client with the largest spending; empty under central trust."""
    if not clients:
        return ""
    worst = clients[0]
    return (
        f"\nworst-off of {len(clients)} clients: client {worst['client']} with epsilon "
        f"{number(worst['epsilon'])} "
        f"after {worst['releases']} releases (all of them: --json)"
    )


def doctor_table(findings: Mapping[str, str | int | list[str] | None]) -> Table:
    """One line per finding."""
    return facts(
        [
            (key, ", ".join(value) if isinstance(value, list) else str(value))
            for key, value in findings.items()
        ]
    )
