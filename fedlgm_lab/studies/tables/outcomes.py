"""Tests of the claims of the bundled studies on their stored runs.

fedlgm study NAME [--seeds N] [--set ...]                     # the runs, in runs/study-NAME
fedlgm study outcomes --set keep=runs/study-NAME --out docs/results  # keeps them, for the pages
"""

from __future__ import annotations

import collections
import math
import shutil
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

from fedlgm.errors import ConfigError
from fedlgm_lab.studies import claims, files
from fedlgm_lab.studies.results import Study
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.rule_map import map_table
from fedlgm_lab.studies.tables.runs import settings
from fedlgm_lab.studies.tables.store import Values
from fedlgm_lab.studies.verdicts import Outcome
from simulations.runs import strict_json
from simulations.runs.headline import is_share

DRAWN = {"002-figure-5": "002-figure-5.png"}
"""Pictures of the page, by study."""
TEXTS = settings("outcomes")
"""Links to other pages with results of a table or figure, and notes on the stored runs, by study.
"""


def studies(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the study files in a folder of results, by name of the study."""
    return {
        path.stem: strict_json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((folder / "studies").glob("*.json"))
    }


def keep(folder: Path, results: Path) -> None:
    """Copy the file of a finished bundled study, and the file of its runs with --tuned, into the
    folder of results.

    Raises:
        ConfigError: the folder does not hold the outcome of a bundled study.
    """
    source = folder / "study.json"
    if not source.is_file():
        raise ConfigError(f"{folder} holds no study.json: run fedlgm study NAME first")
    name = strict_json.loads(source.read_text(encoding="utf-8"))["study"]
    if name not in files.names():
        raise ConfigError(f"{source} is of {name!r}, which is no bundled study")
    for part in ("", "tuned"):
        if (folder / part / "study.json").is_file():
            (results / "studies" / part).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(
                folder / part / "study.json", results / "studies" / part / f"{name}.json"
            )


def check_claims(folder: Path, name: str) -> list[claims.Checked]:
    """Test the claims of a study on its stored runs. A claim is "fragile" if the stored runs at
    searched settings give another outcome.
    """
    paper, tuned = (folder / "studies" / part / f"{name}.json" for part in ("", "tuned"))
    both = [check_claims_of(name, file) for file in (paper, tuned) if file.is_file()]
    return claims.weigh(both[0], both[-1])


def check_claims_of(name: str, file: Path) -> list[claims.Checked]:
    """Test the claims of a study on the runs of one stored file."""
    return _check(name, file, file.stat().st_mtime_ns)


@cache
def _check(name: str, file: Path, changed: int) -> list[claims.Checked]:
    """Test the claims of a file, with a cache, because several tables show the same claims."""
    found = Study.read(file)
    return claims.check(
        files.load(name).claims, found.to_frame(), found.compared_keys, found.headline
    )


def count_outcomes(outcomes: Sequence[str]) -> str:
    """State in words how many claims have each outcome."""
    number = collections.Counter(outcomes)
    return ", ".join(f"{number[one]} {one}" for one in get_args(Outcome) if number[one])


def summary(folder: Path, found: Mapping[str, Any]) -> str:
    """Count the outcomes of all claims by the paper that makes them, separately for searched
    settings and for settings that were not searched.
    """
    papers = {number: f"{number}: {paper.name}" for number, paper in files.papers().items()}
    papers[""] = "none: statements of this library"
    by_paper: dict[str, list[claims.Checked]] = {paper: [] for paper in papers}
    searched = set[int]()
    for name, kept in found.items():
        paper = files.load(name).paper[:3]
        tested = check_claims(folder, name)
        for one in tested:
            by_paper[paper if one.paper and paper in papers else ""].append(one)
        if kept.get("searched") or (folder / "studies" / "tuned" / f"{name}.json").is_file():
            searched |= set(map(id, tested))
    rows = []
    for paper, tested in by_paper.items():
        counted = claims.count_once(tested)
        parts = [
            [claim.outcome for claim in counted if (id(claim) in searched) == tuned]
            for tuned in (True, False)
        ]
        rows.append([papers[paper], *(count_outcomes(outcomes) or "-" for outcomes in parts)])
    made = f"{len(found)} of {len(files.names())} bundled studies have kept runs:"
    counted = [claim for tested in by_paper.values() for claim in claims.count_once(tested)]
    number = sum(claim.outcome == "not decided" for claim in counted)
    told = (
        f"{number} of {len(counted)} claims are not decided. [Seeds and hours that would decide "
        "them](data/studies.md#what-would-decide-the-other-claims)."
    )
    columns = ["paper", "at searched settings", "at one setting"]
    return f"{made}\n\n{table(columns, rows)}\n\n{told}"


def paper_table() -> str:
    """Make the table of the papers, with their numbers, titles, mechanisms, recipes and studies."""

    def join(entries: Sequence[str]) -> str:
        return ", ".join(f"`{entry}`" for entry in entries)

    rows = [
        [
            number,
            f"{paper.authors}: *{paper.title}*",
            f"[{paper.arxiv}](https://arxiv.org/abs/{paper.arxiv})",
            join(paper.mechanisms),
            join(paper.recipes),
            join([name for name in files.names() if files.load(name).paper.startswith(number)]),
        ]
        for number, paper in files.papers().items()
    ]
    return table(["number", "paper", "arXiv", "mechanisms", "recipes", "studies"], rows)


def overview(folder: Path, found: Mapping[str, Any]) -> str:
    """Make the table of the tables and figures that were made, and lists of those that were not."""
    rows, no_data, not_made = [], [], []
    for name in files.names():
        asked = files.load(name)
        if name in found:
            counts = (
                count_outcomes([one.outcome for one in check_claims(folder, name)]) or "kept runs"
            )
            outcome = f"[{counts}](data/studies.md#{name})"
            more = f"; {TEXTS['pages'][name]}" if name in TEXTS["pages"] else ""
            rows.append((asked.paper, f"`fedlgm study {name}`", outcome + more))
        else:
            no_data.append(f"`fedlgm study {name}`")
    grouped: dict[tuple[str, str], list[str]] = {}
    for name, other in files.elsewhere().items():
        if other.why:
            not_made.append(f"{other.paper} ({other.why})")
        elif name in TEXTS["pages"]:
            grouped.setdefault((f"`{other.command}`", TEXTS["pages"][name]), []).append(other.paper)
        else:
            no_data.append(f"`{other.command}`")
    rows += [("; ".join(sorted(papers)), *made) for made, papers in grouped.items()]
    needed = (
        "CIFAR-10 or CIFAR-100, whose folder `data.dir` names, and for ResNets a GPU; with the CNN "
        "all methods with noise [stay at chance](ladp.md#the-papers-own-setting)"
    )
    parts = [
        table(["paper", "command", "outcome"], sorted(rows)),
        f"**Not run at length** ({needed}): {', '.join(sorted(no_data))}.",
        f"**Not made**: {'; '.join(sorted(not_made))}.",
    ]
    return "\n\n".join(parts)


def section(folder: Path, name: str, one: Mapping[str, Any]) -> str:
    """Make the section on a stored study, with its settings, claims and cells."""
    asked, found = files.load(name), Study.read(folder / "studies" / f"{name}.json")
    seeds = int(found.to_frame()["seed"].nunique())
    command = f"    fedlgm study {name} --seeds {seeds}" + "".join(
        f" --grid {key}={','.join(map(str, values))}"
        for key, values in one["grid"].items()
        if values != asked.grid[key] and not any(isinstance(value, dict) for value in values)
    )
    command += "".join(
        f" --set {key}={value}" for key, value in one["set"].items() if asked.set.get(key) != value
    )
    parts = [
        f"## {name}",
        f"{asked.title}. Recipe `{one['recipe']}`, {seeds} seeds ([data](../studies/{name}.json)).",
        command,
        TEXTS["notes"].get(name, ""),
        claims_table(check_claims(folder, name), found.headline),
        cells(found),
        _tuned_section(folder, name),
        f"![{asked.title}](../studies/{DRAWN[name]})" if name in DRAWN else "",
    ]
    return "\n\n".join(part for part in parts if part)


def _tuned_section(folder: Path, name: str) -> str:
    """Make the text on a study's claims and cells at searched settings; empty if there are none."""
    file = folder / "studies" / "tuned" / f"{name}.json"
    if not file.is_file():
        return ""
    found = Study.read(file)
    searched = ", ".join(f"`{key}`" for key in found.records.searched)
    told = (
        f"With {searched} searched for every method and cell (`--tuned`, "
        f"[data](../studies/tuned/{name}.json)):"
    )
    return "\n\n".join(
        [told, claims_table(check_claims_of(name, file), found.headline), cells(found)]
    )


def claims_table(found: Sequence[claims.Checked], headline: str) -> str:
    """Make the table of a study's claims, with the paper's figures if a claim has any."""
    rows = []
    for one in found:
        scale = 100 if is_share(one.metric) else 1
        mean, low, high = (f"{scale * value:+.2f}" for value in (one.mean, one.low, one.high))
        metric = "" if one.metric == headline else f"{one.metric} "
        interval = "-" if math.isnan(one.mean) else f"{metric}{mean} ({low} to {high})"
        rows.append([one.says, one.paper or "-", interval, f"{one.p_holm:.2g}", one.verdict])
    header = ["claim", "paper", "difference (95 % interval)", "p", "outcome"]
    if not any(one.paper for one in found):
        header, *rows = [[*line[:1], *line[2:]] for line in (header, *rows)]
    return table(header, rows) if rows else ""


def cells(found: Study) -> str:
    """Make the table of a study's headline metric (mean and half the width of the 95 % interval),
    with a row for each method and a column for each cell of the grid.
    """
    name, rows = found.headline, found.table(found.headline)
    keys = [key for key in found.keys if key not in ("method", "mechanism")]
    varied = [key for key in keys if rows.groupby("method")[key].nunique().max() > 1]
    searched = [key for key in keys if key not in varied and rows[key].map(str).nunique() > 1]
    columns = list(dict.fromkeys(rows[varied].dropna().itertuples(index=False, name=None))) or [()]
    unit, scale, digits = (" (%)", 100, 1) if is_share(name) else ("", 1, 3)
    lines = []
    for method, own in rows.groupby("method", sort=False):
        line = [str(method), *(str(own[key].iloc[0]) for key in searched)]
        for column in columns:
            here = own
            # runs without privacy belong to the cells of every epsilon
            for key, value in zip(varied, column, strict=True):
                here = here[(here[key] == value) | here[key].isna()]
            reach = (here[f"{name}_high"] - here[f"{name}_low"]) / 2
            shown = zip(here[name], reach, strict=True)
            line.append(
                ", ".join(
                    f"{scale * mean:.{digits}f} ± {scale * half:.{digits}f}" for mean, half in shown
                )
            )
        lines.append(line)
    titles = [
        ", ".join(
            value if isinstance(value, str) else f"{key.rpartition('.')[2]} {value:g}"
            for key, value in zip(varied, column, strict=True)
        )
        for column in columns
    ]
    header = (
        [f"{name}{unit}", *searched, *titles] if varied else ["method", *searched, f"{name}{unit}"]
    )
    return table(header, lines)


def texts(store: Values) -> Pages:
    """Make the summary, the tables of papers and of results, the map of rules, and a section for
    every study with stored runs.
    """
    folder, found = store.folder, studies(store.folder)
    sections = "\n\n".join(section(folder, name, one) for name, one in found.items())
    return {
        "studies.md": {
            "summary": summary(folder, found),
            "papers": paper_table(),
            "overview": overview(folder, found),
        },
        "data/studies.md": {"outcomes": sections},
        "../how-to/which-mechanism.md": {"map": map_table(folder)},
    }


def measure(store: Values) -> None:
    """Copy the study's file that the setting "keep" names.

    Raises:
        ConfigError: the folder of results has no outcomes, or the study's folder has no outcome.
    """
    if "keep" in store.settings:
        keep(Path(store.settings["keep"]), store.folder)
    if not studies(store.folder):
        raise ConfigError(
            f"{store.folder / 'studies'} keeps no outcomes: --set keep=runs/study-NAME keeps those "
            "of a study that has run"
        )


def draw(name: str, store: Values, path: Path) -> None:
    """Draw a study's picture from its stored file."""
    asked, kept = files.load(name), store.folder / "studies" / f"{name}.json"
    if kept.exists():
        Study.read(kept).plot(path, x=asked.x, y=asked.y)


MAKER = Maker(
    "studies.json",
    texts,
    measure,
    Values,
    {f"studies/{path}": partial(draw, name) for name, path in DRAWN.items()},
    {"keep": "the folder of a study that has run"},
)
