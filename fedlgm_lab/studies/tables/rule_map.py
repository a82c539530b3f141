"""The map of docs/how-to/which-mechanism.md, which compares rules in the studies map-*."""

from __future__ import annotations

from pathlib import Path

from fedlgm_lab.studies import claims, files
from fedlgm_lab.studies.files import StudyFile
from fedlgm_lab.studies.results import Study
from fedlgm_lab.studies.tables.pages import table

_CLIENTS = {"adam": "Adam", "sgd": "SGD"}
PLACE = ("data", "epsilon", "clients", "layer sizes")
"""The keys that identify a cell of the map."""


def map_table(folder: Path) -> str:
    """Make the table with a row for each study and network: the accuracy of flat clipping, and each
    rule's difference from this accuracy.

    Args:
        folder: folder of the results; studies without stored runs have no rows.
    """
    studies = kept_studies(folder)
    if not studies:
        return ""
    rules = list(dict.fromkeys(claim.a for claim in studies[0][0].claims))
    rows = [row for study, file in studies for row in _rows(study, file)]
    return table([*PLACE, "`gaussian` (%)", *(f"`{rule}`" for rule in rules)], rows)


def studies_of_map() -> list[StudyFile]:
    """Load the studies of the map."""
    return [files.load(name) for name in files.names() if name.startswith("map-")]


def kept_studies(folder: Path) -> list[tuple[StudyFile, Path]]:
    """List the studies of the map that have a stored file, with these files; studies of digits
    first.
    """
    kept = [(study, folder / "studies" / f"{study.name}.json") for study in studies_of_map()]
    return sorted(((study, file) for study, file in kept if file.is_file()), key=_place)


def _place(entry: tuple[StudyFile, Path]) -> tuple[bool, tuple[str, ...]]:
    """Return a key that sorts the studies of digits before the studies of other data."""
    setting = setting_of(entry[0])
    return setting[0] != "digits", setting


def setting_of(study: StudyFile) -> tuple[str, str, str]:
    """Return the names of a study's data, its epsilon and the clients' optimizer."""
    data = str(study.set.get("data.name", study.recipe)).rsplit(":", 1)[-1]
    clients = _CLIENTS[study.set.get("training.optimizer", "sgd")]
    return data, f"{study.set['privacy.epsilon']:g}", clients


def _rows(study: StudyFile, file: Path) -> list[list[str]]:
    found = Study.read(file)
    frame = found.to_frame()
    tested = claims.check(study.claims, frame, found.compared_keys, found.headline)
    lines = []
    for network in (model["label"] for model in study.grid["model"]):
        flat = frame[(frame["method"] == "gaussian") & (frame["model"] == network)]["accuracy"]
        line = [*setting_of(study), network, f"{100 * flat.mean():.1f}"]
        for claim, outcome in zip(study.claims, tested, strict=True):
            if claim.at["model"] == network:
                mean, low, high = (
                    100 * value for value in (outcome.mean, outcome.low, outcome.high)
                )
                line.append(f"{mean:+.1f} ({low:+.1f} to {high:+.1f}), {outcome.outcome}")
        lines.append(line)
    return lines
