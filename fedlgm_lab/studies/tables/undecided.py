"""Number of seeds, and hours of one core, that would decide the claims that the stored runs leave
undecided.

    fedlgm study undecided --out docs/results    # times one run of each of these studies

The hours count only the claim's runs on the further seeds, without a search.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fedlgm.errors import ConfigError
from fedlgm_lab.studies import claims, files, frames
from fedlgm_lab.studies.claim import Claim
from fedlgm_lab.studies.jobs import grid_jobs
from fedlgm_lab.studies.one_run import bring
from fedlgm_lab.studies.results import Study
from fedlgm_lab.studies.statistics import MOST_SEEDS
from fedlgm_lab.studies.study import base_of
from fedlgm_lab.studies.tables import outcomes
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.store import Kept, Row


class Undecided(NamedTuple):
    """An undecided claim of a stored study.

    The result has no seeds if no runs of one of the claim's methods are stored.

    Attributes:
        study: name of the study.
        claim: the claim.
        checked: the claim's result.
        runs: number of the claim's stored runs for one seed.
    """

    study: str
    claim: Claim
    checked: claims.Checked
    runs: int


def undecided(folder: Path) -> list[Undecided]:
    """List the undecided claims of the stored studies; claims about the same runs count once."""
    cases = []
    for name in outcomes.studies(folder):
        study = Study.read(folder / "studies" / f"{name}.json")
        results = outcomes.check_claims(folder, name)
        for claim, result in zip(files.load(name).claims, results, strict=True):
            cases.append(Undecided(name, claim, result, _runs(claim, study)))
    counted = set(map(id, claims.count_once([case.checked for case in cases])))
    return [
        case
        for case in cases
        if case.checked.outcome == "not decided" and id(case.checked) in counted
    ]


def _runs(claim: Claim, study: Study) -> int:
    """Count a claim's runs for one seed."""
    frame = frames.at(study.to_frame(), claim.at)
    frame = frame[frame["method"].isin(claim.labels)]
    if claim.along is not None:
        ends = frame[claim.along].dropna().unique()[[0, -1]]
        frame = frame[frame[claim.along].isin(ends)]
    return 0 if frame.empty else int(frame.groupby("seed").size().max())


def time_run(kept: Mapping[str, Any], method: str) -> Row:
    """Measure the processor seconds of a method's first run, at the settings of a stored study.

    Raises:
        ConfigError: the run fails.
    """
    base, own, options = base_of(kept["recipe"], kept["grid"], {}, kept["set"])
    jobs = grid_jobs(base, kept["grid"], range(1), options, own)
    job = next(job for job in jobs if job.method == method)
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        ended = bring(job, Path(folder))
    if ended.why is not None:
        raise ConfigError(f"{kept['study']}: its run has no time, because it failed: {ended.why}")
    return {"seconds": round(time.process_time() - started, 1)}


def measure(store: Kept) -> None:
    """Time one run of each study that has an undecided claim with runs."""
    studies = outcomes.studies(store.folder)
    methods = {
        case.study: case.claim.a for case in reversed(undecided(store.folder)) if case.checked.seeds
    }
    for name, method in sorted(methods.items()):
        store.keep({"study": name, "method": method}, partial(time_run, studies[name], method))


def rows(store: Kept) -> list[list[str]]:
    """Make a row of the table for every undecided claim."""
    lines = []
    for case in undecided(store.folder):
        seconds = [row["seconds"] for row in store.find(study=case.study)]
        have, needed = case.checked.seeds, case.checked.needed
        hours = "-"
        if needed is not None and seconds:
            hours = f"{max(0, needed - have) * case.runs * seconds[0] / 3600:.2g}"
        lines.append([
            f"[{case.study}](#{case.study})",
            case.checked.says,
            str(have),
            "-" if not have else f"more than {MOST_SEEDS}" if needed is None else str(needed),
            str(case.runs) if have else "-",
            f"{seconds[0]:g}" if seconds else "-",
            hours,
        ])  # fmt: skip
    return lines


def texts(store: Kept) -> Pages:
    """Make the table of undecided claims."""
    header = [
        "study", "claim", "seeds", "seeds that would decide", "runs of a seed",
        "seconds of a run", "hours",
    ]  # fmt: skip
    return {"data/studies.md": {"undecided": table(header, rows(store))}}


MAKER = Maker("study-seconds.json", texts, measure, partial=True)
