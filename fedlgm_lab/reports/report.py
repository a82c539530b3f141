"""Writes the report of a finished run as an HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedlgm import data as data_sets
from fedlgm.errors import FedlgmError, RunError
from fedlgm.files import PRIVATE, PUBLIC, explain_failure, write_durably
from fedlgm.privacy.guarantee import Trust
from fedlgm.privacy.ledger import Ledger
from fedlgm_lab.reports import page
from fedlgm_lab.reports.measured import Measurements
from fedlgm_lab.reports.parties import list_parties, list_sites
from fedlgm_lab.reports.pictures import (
    Picture,
    division,
    heat_map,
    layer_columns,
    over_rounds,
    per_layer,
)
from fedlgm_lab.reports.trade_off import bounds_table, draw_curve
from simulations.config.recipe import Recipe
from simulations.runs.folder import RunFolder
from simulations.runs.rows import RunSummary
from simulations.runs.stopping import reported_rates
from simulations.summaries.ledgers import checked_ledger_report
from simulations.summaries.planning import class_counts
from simulations.summaries.rounds import noise_in_words, noise_over_rounds, stored_sigma
from simulations.summaries.terminal import OF_Z, number

_LONGEST = 12  # largest number of kinds of charges that a page lists


def write_report(run: Path, private: bool = False) -> RunSummary:
    """Write a run's report as one self-contained HTML file, and return its summary with the file as
    `report`.

    The page holds the run's public figures: the test figures of the released models, the plans and
    the ledger. It shows the division of the data among clients only for bundled data sets, which
    are public.

    Args:
        run: run folder.
        private: also show the operator's figures (participants, round times, failures, the division
            of data that is not bundled, results of attacks and audits of the run). The page is then
            `private/report.html`, which only its owner may read, and `report.html` is not changed.

    Raises:
        RunError: the folder is not a run's, the run is not finished, or the page cannot be written.
        LedgerError: the ledger does not match the recipe, the checkpoints, the result or its
            hashes.
    """
    folder = RunFolder.open(run)
    result, rows = folder.verified_result(), folder.rows(private=private)
    recipe = folder.recipe()
    with Ledger(folder.ledger_file) as charges:
        rates = reported_rates(recipe, charges)
        ledger = checked_ledger_report(folder, charges, rates)
    measured = Measurements.of_run(folder) if private else None
    text = page.render(
        "report.html",
        title=str(result["recipe"]),
        subtitle=recipe.title,
        result=result,
        infinity=float("inf"),
        longest=_LONGEST,
        figures=page.key_figures(result),
        rates=rates,
        measured=measured,
        attackers={
            "sentence": rates.sentence(recipe.units),
            "table": bounds_table(rates, recipe.unit),
            "curve": draw_curve(rates, recipe.units, measured),
        },
        curves=_curves(result, rows),
        layers=_layers(folder, rows),
        noise=_noise(folder, rows, float(result["noise_multiplier"])),
        parties=_parties(recipe.privacy.trust, _is_simulated(folder)),
        sites=_sites(folder, recipe, int(result["rounds"])),
        division=_division(folder, private),
        inputs=_inputs(folder),
        ledger=_ledger(ledger),
        origin=_origin(folder, result),
        operator=_operator(rows) if private else None,
    )
    target = folder.private / "report.html" if private else folder.path / "report.html"
    _write(target, text, private)
    reported = result.copy()
    reported["report"] = str(target)
    return reported


def _curves(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[Picture | None]:
    pictures = page.curves(rows, str(result["guarantee_status"]))
    noise = [row["noise_norm"] for row in rows]
    if max(noise, default=0.0) > min(noise, default=0.0) * 1.001:
        pictures.append(
            over_rounds(
                "Noise on the mean update", [row["round"] for row in rows], {"noise norm": noise}
            )
        )
    return pictures


def _layers(folder: RunFolder, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    layers = folder.provenance.layers()
    if not rows or len(rows[-1]["clip"]) != len(layers):
        return {}
    names, correlated = list(layers), folder.recipe().privacy.noise != "independent"
    wanted = (
        ("Bound s_j", "clip", True),
        (f"Noise scale sigma_j{OF_Z if correlated else ''}", "sigma", True),
        ("Signal to noise ratio SNR_j", "snr", True),
        ("Share of the budget p_j", "share", False),
        ("Norm of the released mean, with its noise", "released_norm", True),
    )
    pictures = []
    for title, key, log in wanted:
        rounds, values = layer_columns(rows, key, len(layers))
        pictures.append(per_layer(title, names, rounds, values, log=log))
    answers = [{**row, **(row.get("queries") or {})} for row in rows]
    rounds, within = layer_columns(answers, "below-bound", len(layers))
    pictures.append(
        per_layer(
            "Share of clients that were clipped (noisy)",
            names,
            rounds,
            1.0 - within,
            limits=(0.0, 1.0),
        )
    )
    caption = f"Layers as planned for round {rows[-1]['round']}"
    table = page.layer_table(page.layer_rows(rows[-1], layers), caption, correlated=correlated)
    return {"table": table, "count": len(layers), "pictures": pictures}


def _noise(
    folder: RunFolder, rows: Sequence[Mapping[str, Any]], multiplier: float
) -> dict[str, Any]:
    """Draw the noise by layer and round, and the noise in the sum of the rounds, for a run whose
    rounds are one mechanism.
    """
    from simulations.config.facts import facts_of

    recipe, layers = folder.recipe(), folder.provenance.layers()
    if len(rows) != recipe.federation.rounds:
        return {}
    if recipe.sampling.separation is None:
        return {}
    sigma = stored_sigma(rows)
    facts = facts_of(recipe).with_multiplier(multiplier)
    noise = noise_over_rounds(facts, sigma, np.array(list(layers.values())), recipe.workload)
    if noise is None:
        return {}
    rounds, values = layer_columns(rows, "layer_noise", len(layers))
    series = {name: list(values) for name, values in noise.series().items()}
    told = "; ".join(f"{name} {number(value)}" for name, value in noise.means().items())
    pictures = [
        heat_map(
            "Noise norm of one round's mean",
            list(layers),
            rounds,
            values / facts.sampling.expected,
            log=True,
        ),
        over_rounds("Noise norm of the model", range(1, noise.rounds + 1), series),
    ]
    return {"words": noise_in_words(recipe), "means": told, "pictures": pictures}


def _is_simulated(folder: RunFolder) -> bool:
    clients = folder.provenance.read().get("clients", "simulated clients")
    return bool(clients == "simulated clients")


def _parties(trust: Trust, simulated: bool) -> page.Table:
    return page.Table(
        ("party", "what it sees"), list_parties(trust, simulated), "Parties to the run", words=True
    )


def _sites(folder: RunFolder, recipe: Recipe, rounds: int) -> page.Table | None:
    """Make the table of the sites; None if they have no public names."""
    names = folder.provenance.read().get("sites", [])
    privacy, rate = recipe.privacy, recipe.sampling.rate
    rows = list_sites(names, privacy.trust, rounds, rate, privacy.max_participations)
    head = ("site", "what it contributed", "what it saw")
    return page.Table(head, rows, f"{len(rows)} sites", words=True) if rows else None


def _division(folder: RunFolder, private: bool) -> dict[str, Any]:
    """Draw the division of the data. If the data are not bundled, only the operator's page shows
    it.
    """
    from simulations.config.assembly import Assembly

    recipe = folder.recipe()
    public = data_sets.is_bundled(recipe.data.name)
    if not _is_simulated(folder):
        return {"facts": None, "note": "", "picture": None}
    facts = [
        ("data", str(recipe.data.name)),
        ("partition", _options(recipe.data.partition, recipe.data.options)),
        ("clients", f"{recipe.federation.clients:,}"),
        ("drawn per round", f"{recipe.sampling.expected:g} expected, {recipe.federation.sampling}"),
    ]
    shown: dict[str, Any] = {"facts": facts, "note": "", "picture": None}
    if not public and not private:
        note = "The division of this data set is not released: `fedlgm report --private` shows it."
        return shown | {"note": note}
    try:
        return shown | {"picture": division(class_counts(Assembly(recipe)))}
    except (FedlgmError, ImportError) as error:
        return shown | {"note": f"The division cannot be drawn here: {error}"}


def _inputs(folder: RunFolder) -> dict[str, Any]:
    """List the columns of tabular data in the order of the model's inputs, and the class names."""
    columns, labels = folder.provenance.read().get("columns"), folder.labels()
    rows = [
        (
            column["name"],
            column["dtype"],
            *(f"{column[key]:.6g}" if key in column else "" for key in ("mean", "deviation")),
        )
        for column in columns or ()
    ]
    head = ("column", "kind", "mean", "deviation")
    table = page.Table(head, rows, "Columns, in the order of the inputs", words=True)
    names = [("names, in their order", ", ".join(labels))] if labels else []
    return {"labels": names, "table": table if columns else None}


def _options(name: str, options: Mapping[str, Any]) -> str:
    return (
        f"{name} ({', '.join(f'{key} = {value}' for key, value in options.items())})"
        if options
        else name
    )


def _ledger(ledger: Mapping[str, Any]) -> dict[str, Any]:
    events = ledger["events"]
    rows = [
        (
            row["rounds"].replace("-", "–"),
            str(row["count"]),
            f"{row['released']}; {row['noise']}; sampling: {row['sampling']}",
        )
        for row in events[:_LONGEST]
    ]
    accounted = f"{str(ledger['accountant']).upper()} accountant, budget {ledger['budget']:g}"
    charged = f"epsilon {number(ledger['epsilon'])} at delta {ledger['delta']:g} ({accounted})"
    heads = f"{ledger['anchors']} heads kept in checkpoints and result"
    facts = [
        ("charged", charged),
        ("claimed", f"epsilon {number(ledger['claimed_epsilon'])}"),
        ("head", str(ledger["ledger_head"])),
        ("verified", f"rows follow from each other and from the recipe, and agree with {heads}"),
    ]
    head = ("rounds", "releases", "what was released, and its noise")
    table = page.Table(head, rows, "Charges", words=True)
    more = len(events) - len(rows)
    return {"facts": facts, "table": table, "more": more, "notes": ledger["notes"]}


def _origin(folder: RunFolder, result: Mapping[str, Any]) -> dict[str, Any]:
    provenance = folder.provenance.read()
    versions = provenance.get("versions", {})
    facts = [
        ("model SHA-256", str(result["model_sha256"])),
        ("mechanism", f"{result['mechanism']}, {result['variant']}"),
        (
            "noise",
            (
                f"drawn by {result.get('noise_backend', 'cpu')}; trained on "
                f"{result.get('device', 'cpu')}"
            ),
        ),
        ("trained by", provenance.get("trained_by", "")),
        (
            "seed",
            "public: the noise can be drawn again"
            if result["noise_reproducible"]
            else "none: fresh noise",
        ),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    recipe = folder.recipe_file.read_text(encoding="utf-8")
    return {"facts": [fact for fact in facts if fact[1]], "recipe": recipe}


def _operator(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Collect the figures that only the operator may see."""
    private_rows = [row for row in rows if "cohort" in row]
    rounds = [row["round"] for row in private_rows]
    taking_part = {
        "drawn": [row["cohort"] for row in private_rows],
        "asked": [row["present"] for row in private_rows],
    }
    pictures = [
        over_rounds("Clients that took part", rounds, taking_part),
        over_rounds(
            "Seconds per round", rounds, {"seconds": [row["seconds"] for row in private_rows]}
        ),
    ]
    discarded = [(row["round"], row["discarded"]) for row in private_rows if row["discarded"]]
    failed = [(row["round"], failure) for row in private_rows for failure in row["failures"]]
    cells = [
        (str(r), str(f["kind"]), str(f["node"]), str(f["client"]), str(f["reason"]))
        for r, f in failed
    ]
    most = min(len(cells), 10 * _LONGEST)
    caption = f"Failures, the first {most} of {len(cells)}"
    head = ("round", "kind", "node", "client", "reason")
    table = page.Table(head, cells[:most], caption, words=True) if cells else None
    return {"pictures": pictures, "discarded": discarded, "failures": table}


def _write(target: Path, text: str, private: bool) -> None:
    """Write the page completely or not at all; only its owner may read the operator's page."""
    try:
        target.parent.mkdir(mode=0o700, exist_ok=True)
        write_durably(target, text.encode(), PRIVATE if private else PUBLIC, shared=True)
    except OSError as error:
        raise RunError(explain_failure(f"cannot write {target}", error)) from error
