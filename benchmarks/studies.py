"""Kept outcomes of the bundled studies, and the page that shows them.

fedlgm study NAME [--seeds N] [--set ...]                  # makes or continues the runs, in
runs/study-NAME python -m benchmarks.studies keep runs/study-NAME [...]    # keeps its study.json
beside the page python -m benchmarks.studies page                          # rewrites
docs/results/studies.md and data/studies.md python -m benchmarks.studies ratios
# what workers and a second call save: needs an idle machine

`ratios` keeps docs/results/study-ratios.json; `--turns 1 --rounds 2 --out FILE` is a short trial.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks.pages import show, table
from fedlgm.errors import ConfigError
from fedlgm_lab.studies import claims, files
from fedlgm_lab.studies.results import Study
from fedlgm_lab.studies.study import study
from fedlgm_lab.studies.verdicts import Outcome
from simulations.runs import strict_json
from simulations.runs.headline import is_share

PAGE = Path(__file__).parents[1] / "docs" / "results" / "studies.md"
DATA_PAGE = PAGE.parent / "data" / PAGE.name
KEPT, RATIOS = PAGE.with_suffix(""), PAGE.with_name("study-ratios.json")
DRAWN = {"002-figure-5": "002-figure-5.png"}
"""Pictures of the page, by study."""
ELSEWHERE = {
    "000-table-1": "[allocations](allocations.md#table-1-of-the-paper): 6 rules reproduced",
    "000-table-2-fashion-mnist": "[central allocations](central-allocations.md), with searched "
    "rates",
    "000-table-3-fashion-mnist": "[FashionMNIST](fashion-mnist.md), with the paper's rates",
    "003-table-4": "[i.n.i.d. noise](inid.md), other settings",
    "004-table-2": "[LaDP](ladp.md), other settings",
    "ladp-one-budget": "[LaDP](ladp.md)",
    "002-figure-2": "[LM-DP-SGD](lm-dp-sgd.md)",
    "002-figure-4": "[LM-DP-SGD](lm-dp-sgd.md)",
    "002-figure-5-bias": "[LM-DP-SGD](lm-dp-sgd.md): 1 reproduced, 2 not decided",
    "002-table-3": "[LM-DP-SGD](lm-dp-sgd.md)",
    "002-table-5": "[LM-DP-SGD](lm-dp-sgd.md)",
    "002-table-7": "[LM-DP-SGD](lm-dp-sgd.md)",
    "003-figure-1": "[i.n.i.d. noise](inid.md)",
    "003-figure-5": "[i.n.i.d. noise](inid.md)",
    "003-table-1": "[i.n.i.d. noise](inid.md)",
    "003-table-2": "[i.n.i.d. noise](inid.md)",
    "003-table-3": "[i.n.i.d. noise](inid.md)",
    "004-table-4": "[LaDP](ladp.md)",
    "004-figure-5": "[LaDP](ladp.md): lower by construction",
    "002-figure-6-bias": "[LM-DP-SGD](lm-dp-sgd.md)",
    "002-figure-7-bias": "[LM-DP-SGD](lm-dp-sgd.md)",
    "002-table-8": "[LM-DP-SGD](lm-dp-sgd.md)",
    "003-figure-2": "[i.n.i.d. noise](inid.md)",
    "003-figure-3": "[i.n.i.d. noise](inid.md)",
    "003-figure-4": "[i.n.i.d. noise](inid.md)",
    "003-figure-6": "[i.n.i.d. noise](inid.md)",
    "003-table-5": "[i.n.i.d. noise](inid.md)",
    "004-figure-4": "[in 004-table-2](data/studies.md#004-table-2)",
    "004-table-3": "[in 004-table-2](data/studies.md#004-table-2)",
    "004-table-8": "[in 004-table-2](data/studies.md#004-table-2)",
    "004-figure-7": "[attacks](attacks.md)",
    "004-table-10": "[attacks](attacks.md)",
    "layer-wise-deep": "[does `recommend` predict runs?](recommend.md)",
    "layer-wise-bottleneck": "[does `recommend` predict runs?](recommend.md)",
    "layer-wise-cnn": "[allocations learned from releases](adaptive.md#water-filling)",
    "layer-wise-falling": "[allocations learned from releases](adaptive.md#water-filling)",
    "layer-wise-water-filling": "[allocations learned from releases](adaptive.md#water-filling)",
    "layer-wise-narrow-wide-narrow": "[does `recommend` predict runs?](recommend.md)",
}
"""Pages that hold results of a table or figure beside the studies."""
PAPERS = {
    "000": "000: SNR-consistent allocation",
    "002": "002: LM-DP-SGD",
    "003": "003: i.n.i.d. noise",
    "004": "004: LaDP-FL",
    "": "none: rules of this library",
}
"""Names of the papers on the page, by their numbers in the names of studies; "" is for studies of
no paper."""
_MORE_SEEDS = (
    "The first {} seeds were seen before the others were added, so p is somewhat too small."
)
NOTES = {
    **dict.fromkeys(("002-figure-3", "002-figure-5", "voted-share"), _MORE_SEEDS.format("five")),
    "003-table-4": _MORE_SEEDS.format("three"),
    "000-table-2-fashion-mnist": "These runs make four passes over the data instead of the "
    "recipe's 17, at rates that were not searched, so the outcomes do not tell about the paper's "
    "setting.",
    "000-figure-1": "These runs make one pass over the data instead of the recipe's 17. Accuracy "
    "does not depend on the budget yet, so they cannot separate the rules.",
    "000-figure-2": "These runs make 100 rounds instead of the recipe's 300. At this length, "
    "accuracy falls as the budget grows: the sigmoid network starts at chance level and leaves "
    "it sooner with more noise (flat Gaussian, one further run each: 37 % in round 40 at epsilon "
    "1; 10 % in round 90 and 26 % in round 100 at epsilon 8). The figures do not compare the "
    "rules at their final accuracy.",
    "003-table-4-example-level": "These runs make 500 steps instead of the recipe's 2,000, at a "
    "rate that was not searched.",
    "000-table-3-fashion-mnist": "These runs make 100 rounds instead of the recipe's 300. Only the "
    "methods of the claims ran, none of the rows with MedClip.",
    "004-figure-8": "Scores are slow (`mechanism.memory = 0.95`, the default). Nothing was chosen "
    "on these seeds.",
    "004-table-2": "Scores are slow (`mechanism.memory = 0.95`, the default). Nothing was chosen "
    "on these seeds.",
    "layer-choice": "The initial weights of a network that narrows have their largest norms in the "
    "first layers, so LaDP's rule leaves the output layer at its random start. All votes for two "
    "layers kept the output layer, and the other winner differed by seed. The setting thus "
    "favours the vote. The rate of one layer by norm is the lowest searched.",
}
"""Caveats of kept runs, shown on the page."""


def kept() -> dict[str, dict[str, Any]]:
    """The kept files, by study."""
    return {
        path.stem: strict_json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(KEPT.glob("*.json"))
    }


def keep(folder: Path) -> Path:
    """Keep the outcome of a bundled study that has run.

    Raises:
        ConfigError: the folder holds none.
    """
    source = folder / "study.json"
    if not source.is_file():
        raise ConfigError(f"{folder} holds no study.json: run fedlgm study NAME first")
    name = strict_json.loads(source.read_text(encoding="utf-8"))["study"]
    if name not in files.names():
        raise ConfigError(f"{source} is of {name!r}, which is no bundled study")
    KEPT.mkdir(exist_ok=True)
    shutil.copyfile(source, KEPT / f"{name}.json")
    return KEPT / f"{name}.json"


def checked(name: str) -> list[claims.Checked]:
    """The claims of a study, checked against its kept runs; "fragile" if its kept runs at searched
    settings give another outcome.
    """
    paper, tuned = KEPT / f"{name}.json", KEPT / "tuned" / f"{name}.json"
    both = [checked_in(name, file) for file in (paper, tuned) if file.is_file()]
    return claims.weigh(both[0], both[-1])


def checked_in(name: str, file: Path) -> list[claims.Checked]:
    """The claims of a study, checked against the runs of one kept file."""
    found = Study.read(file)
    return claims.check(
        files.load(name).claims, found.to_frame(), found.compared_keys, found.headline
    )


def counted(outcomes: Sequence[str]) -> str:
    """How many claims have which outcome."""
    number = collections.Counter(outcomes)
    return ", ".join(f"{number[one]} {one}" for one in get_args(Outcome) if number[one])


def summary(found: Mapping[str, Any]) -> str:
    """The claims of all kept studies, by paper."""
    by_paper: dict[str, list[claims.Checked]] = {paper: [] for paper in PAPERS}
    for name in found:
        paper = files.load(name).paper[:3]
        by_paper[paper if paper in PAPERS else ""] += checked(name)
    rows = []
    for paper, ones in by_paper.items():
        outcomes = [one.outcome for one in claims.count_once(ones)]
        rows.append([PAPERS[paper], str(len(outcomes)), counted(outcomes)])
    made = f"{len(found)} of {len(files.names())} bundled studies have kept runs:"
    return f"{made}\n\n{table(['paper', 'claims', 'outcomes'], rows)}"


def overview(found: Mapping[str, Any]) -> str:
    """A row for every table and figure that was made, and lists of the others."""
    rows, no_data, not_made = [], [], []
    for name in files.names():
        asked = files.load(name)
        if name in found:
            outcome = f"[{counted([one.outcome for one in checked(name)]) or 'kept runs'}](data/studies.md#{name})"
            more = f"; {ELSEWHERE[name]}" if name in ELSEWHERE else ""
            rows.append((asked.paper, f"`fedlgm study {name}`", outcome + more))
        else:
            no_data.append(f"`fedlgm study {name}`")
    grouped: dict[tuple[str, str], list[str]] = {}
    for name, other in files.elsewhere().items():
        if other.why:
            not_made.append(f"{other.paper} ({other.why})")
        elif name in ELSEWHERE:
            grouped.setdefault((f"`{other.command}`", ELSEWHERE[name]), []).append(other.paper)
        else:
            no_data.append(f"`{other.command}`")
    rows += [("; ".join(sorted(papers)), *made) for made, papers in grouped.items()]
    needed = (
        "CIFAR-10, CIFAR-100 or MNIST; a study runs once `data.dir` names a folder with the set"
    )
    parts = [
        table(["paper", "command", "outcome"], sorted(rows)),
        f"**Data not at hand** ({needed}): {', '.join(sorted(no_data))}.",
        f"**Not made**: {'; '.join(sorted(not_made))}.",
    ]
    return "\n\n".join(parts)


def section(name: str, one: Mapping[str, Any]) -> str:
    """Settings, claims and cells of a kept study."""
    asked, found = files.load(name), Study.read(KEPT / f"{name}.json")
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
        NOTES.get(name, ""),
        claimed(checked(name), found.headline),
        cells(found),
        _tuned(name),
        f"![{asked.title}](../studies/{DRAWN[name]})" if name in DRAWN else "",
    ]
    return "\n\n".join(part for part in parts if part)


def _tuned(name: str) -> str:
    """The claims and cells of a study at searched settings; empty if it was not tuned."""
    file = KEPT / "tuned" / f"{name}.json"
    if not file.is_file():
        return ""
    found = Study.read(file)
    searched = ", ".join(f"`{key}`" for key in found.records.searched)
    told = (
        f"With {searched} searched for every method and cell (`--tuned`, "
        f"[data](../studies/tuned/{name}.json)):"
    )
    return "\n\n".join([told, claimed(checked_in(name, file), found.headline), cells(found)])


def claimed(found: Sequence[claims.Checked], headline: str) -> str:
    """A study's claims in Markdown, with the paper's figures if it has any."""
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
    """A study's headline metric in Markdown, methods by cells of the grid: mean and half the 95 %
    interval.
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
            for key, value in zip(
                varied, column, strict=True
            ):  # runs without privacy belong to every epsilon
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


def saved() -> str:
    """Savings by workers and by a second call, once they have been measured."""
    if not RATIOS.is_file():
        return "Not measured yet: `python -m benchmarks.studies ratios`."
    found = strict_json.loads(RATIOS.read_text(encoding="utf-8"))
    return (
        f"On {found['cores']} cores a study of {found['runs']} runs of {found['rounds']} rounds "
        f"took {found['two_workers']:.2f} times as long with two workers as with one, and a second "
        f"call {found['second_call']:.2f} times as long (medians of {found['turns']} turns; equal "
        "frames). The command is `python -m benchmarks.studies ratios` "
        "([data](study-ratios.json))."
    )


def pages() -> dict[Path, dict[str, str]]:
    """The generated parts of the page and of its page of data."""
    found = kept()
    outcomes = "\n\n".join(section(name, one) for name, one in found.items())
    return {
        PAGE: {"summary": summary(found), "saved": saved(), "overview": overview(found)},
        DATA_PAGE: {"outcomes": outcomes},
    }


def draw(name: str, path: Path) -> None:
    """A study's picture, from its kept file."""
    asked = files.load(name)
    Study.read(KEPT / f"{name}.json").plot(path, x=asked.x, y=asked.y)


# -- what workers and a second call save ---------------------------------------------------------------------------


def ratios(turns: int, rounds: int) -> dict[str, Any]:
    """Seconds of a study of 2 mechanisms x 2 budgets x 3 seeds: with one worker, with two, and
    called again.

    The three are timed in turns, each turn in new folders. The second call reads what the first has
    written.

    Args:
        turns: repetitions.
        rounds: rounds of each run.
    """
    grid = {"mechanism": ["uniform", "snr-consistent"], "privacy.epsilon": [8.0, 2.0]}
    changes = {"federation.rounds": rounds, "run.evaluate_every": rounds}
    seconds: dict[str, list[float]] = {"one": [], "two": [], "again": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(turns):
            made = {}
            for name, workers, place in (("one", 1, "one"), ("two", 2, "two"), ("again", 1, "one")):
                began = time.perf_counter()
                out = Path(folder) / f"{turn}-{place}"
                done = study(
                    "digits",
                    grid=grid,
                    workers=workers,
                    folder=out,
                    overrides=changes,
                    progress=False,
                )
                made[name] = done.to_frame().drop(columns=["seconds", "folder"])
                seconds[name].append(time.perf_counter() - began)
            if not (made["one"].equals(made["two"]) and made["one"].equals(made["again"])):
                raise AssertionError("the frames differ")
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "two_workers": middle["two"] / middle["one"],
        "second_call": middle["again"] / middle["one"],
        "aims": {"two_workers": 0.6, "second_call": 1 / 3},
        "runs": 12,
        "rounds": rounds,
        "turns": turns,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["keep", "page", "ratios"])
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RATIOS, help="file of the ratios")
    arguments = parser.parse_args()
    if arguments.what == "keep":
        for folder in arguments.folders:
            print(keep(folder))
    elif arguments.what == "page":
        for name, path in DRAWN.items():
            draw(name, KEPT / path)
        for page, texts in pages().items():
            show(page, texts, write=True)
    else:
        text = json.dumps(ratios(arguments.turns, arguments.rounds), indent=1)
        arguments.out.write_text(text + "\n", encoding="utf-8")
        print(text)


if __name__ == "__main__":
    main()
