"""Reports of a finished or interrupted run."""

from __future__ import annotations

import base64
import html
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedlgm.errors import RunError
from fedlgm.privacy.ledger import Ledger
from simulations.reports.headline import headline, shown
from simulations.reports.terminal import epsilon_label, number
from simulations.runs.folder import RunFolder

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse; margin: 1rem 0 }} td, th {{ padding: .25rem .8rem; border-bottom: 1px solid #ddd }}
th {{ text-align: left; font-weight: 600 }} img {{ max-width: 100% }} pre {{ background: #f6f6f6; padding: 1rem }}
.none {{ color: #a00000; font-weight: 600 }}
</style></head><body><h1>{title}</h1>
<p class="{status}">{guarantee}</p>
<table>{rows}</table>
<p><img alt="test figures and epsilon over the rounds" src="data:image/png;base64,{picture}"></p>
<h2>Recipe</h2><pre>{recipe}</pre>
</body></html>
"""


def write_report(run: Path) -> dict[str, Any]:
    """Write `report.html` into a run folder and return the run's summary."""
    from simulations.reports.figures import draw_run

    folder = RunFolder.open(run)
    result, rows = folder.result(), folder.rows()
    if result is None:
        raise RunError(f"{run} is not finished: continue it with `fedlgm simulate --resume {run}`")
    with tempfile.TemporaryDirectory() as directory:
        picture = Path(directory) / "run.png"
        draw_run(rows, str(result["recipe"]), picture)
        encoded = base64.b64encode(picture.read_bytes()).decode()
    name, value = headline(result)
    figures = {
        f"test {name}": shown(name, value),
        "epsilon claimed": number(result["claimed_epsilon"]),
        epsilon_label(str(result["guarantee_status"])): number(result["epsilon"]),
        "delta": f"{result['delta']:g}",
        "rounds": str(result["rounds"]),
        "mechanism": f"{result['mechanism']} ({result['variant']})",
        "noise multiplier": f"{result['noise_multiplier']:.4f}",
        "noise drawn by": str(result.get("noise_backend", "cpu")),
        "model sha256": str(result["model_sha256"]),
    }
    page = _PAGE.format(
        title=html.escape(f"fedlgm run: {result['recipe']}"),
        status=html.escape(str(result["guarantee_status"])),
        guarantee=html.escape(str(result["guarantee"])),
        rows=_table_rows(figures.items()),
        picture=encoded,
        recipe=html.escape(folder.recipe_file.read_text(encoding="utf-8")),
    )
    (folder.path / "report.html").write_text(page, encoding="utf-8")
    return result


def ledger_report(run: Path) -> dict[str, Any]:
    """Charges of a run, grouped by event, with the accountant's and the claimed totals, after checking the ledger.

    Raises:
        LedgerError: the ledger does not fit the recipe, the checkpoints, the result or its own hashes.
    """
    folder = RunFolder.open(run)
    recipe = folder.recipe()
    privacy = recipe.privacy
    folder.verify()
    with Ledger(folder.ledger_file) as ledger:
        head = ledger.head()
        groups: dict[str, dict[str, Any]] = {}
        for charge in ledger.charges():
            group = groups.setdefault(
                str(charge.event), {"first": charge.round, "count": 0, "event": str(charge.event)}
            )
            group["last"] = charge.round
            group["count"] += 1
        return {
            "run": str(run),
            "ledger_head": str(head),
            "anchors": len(folder.anchors()),
            "guarantee": (folder.result() or {}).get("guarantee", ""),
            "noise_reproducible": recipe.run.seed is not None,
            "events": list(groups.values()),
            "epsilon": ledger.epsilon(privacy.delta, privacy.accountant),
            "claimed_epsilon": ledger.claimed_epsilon(privacy.delta, privacy.accountant),
            "delta": privacy.delta,
            "budget": privacy.epsilon,
            "accountant": privacy.accountant,
        }


def _table_rows(pairs: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in pairs)
