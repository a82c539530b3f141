"""Which rule wins where: the map of docs/how-to/which-mechanism.md, from the kept studies map-*."""

from __future__ import annotations

from pathlib import Path

from fedlgm_lab.studies import claims, files
from fedlgm_lab.studies.results import Study
from fedlgm_lab.studies.tables.pages import table

CLIENTS = {"map-adam": "Adam", "map-sgd": "SGD"}


def map_table(folder: Path) -> str:
    """A row for each optimizer and network: accuracy of flat clipping, and each rule's difference.

    Args:
        folder: kept results; the table is empty if a map was not run.
    """
    kept = {name: folder / "studies" / f"{name}.json" for name in CLIENTS}
    if not all(file.is_file() for file in kept.values()):
        return ""
    rules = list(dict.fromkeys(claim.a for claim in files.load("map-adam").claims))
    header = ["clients", "layer sizes", "`gaussian` (%)", *(f"`{rule}`" for rule in rules)]
    return table(header, [row for name, file in kept.items() for row in _rows(name, file)])


def _rows(name: str, file: Path) -> list[list[str]]:
    study, found = files.load(name), Study.read(file)
    frame = found.to_frame()
    tested = claims.check(study.claims, frame, found.compared_keys, found.headline)
    lines = []
    for network in (model["label"] for model in study.grid["model"]):
        flat = frame[(frame["method"] == "gaussian") & (frame["model"] == network)]["accuracy"]
        line = [CLIENTS[name], network, f"{100 * flat.mean():.1f}"]
        for claim, outcome in zip(study.claims, tested, strict=True):
            if claim.at["model"] == network:
                mean, low, high = (
                    100 * value for value in (outcome.mean, outcome.low, outcome.high)
                )
                line.append(f"{mean:+.1f} ({low:+.1f} to {high:+.1f}), {outcome.outcome}")
        lines.append(line)
    return lines
