"""Studies in TOML files, which are users' files or the bundled files for the papers' tables and
figures.

title = "Three mechanisms at two budgets"
recipe = "digits"
seeds = 5

[grid]
mechanism = [
    "uniform",
    "gaussian",
    {label = "small bound", name = "uniform", options = {bound = 0.5}},
]
"privacy.epsilon" = [8.0, 2.0]

[set]                      # changes of the recipe for all runs
"federation.rounds" = 50

[quick]                    # further changes with --quick
"federation.rounds" = 2

[[claims]]                 # a claim to test, see `fedlgm_lab.studies.claims`
says = "A small bound costs accuracy"
a = "small bound"
b = "uniform"
expect = "lower"
each = "privacy.epsilon"   # one claim for each value of this key; its sentence ends in "at 8.0"
"""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedlgm.errors import ConfigError, Notice
from fedlgm.wording import alternatives, describe_problem
from fedlgm_lab.studies.claim import Claim
from fedlgm_lab.studies.search import LEAST_SEEDS
from fedlgm_lab.studies.tables.titles import TITLES
from simulations.config import extends
from simulations.config.grids import parse_grid
from simulations.config.overrides import settings
from simulations.config.sections import Label

BUNDLED = Path(__file__).parent / "bundled"
_ELSEWHERE, _PAPERS = "elsewhere", "papers"


class StudyFile(BaseModel):
    """Content of a study's file.

    Attributes:
        name: name of the study; default: name of its file.
        title: title in one line.
        paper: the table or figure that the study reproduces, such as "002, Table 3".
        data: the data that the study needs, and where to get them; empty for bundled data.
        recipe: name of a bundled recipe, or path of a recipe file.
        seeds: number of repetitions of each combination.
        grid, search, search_seeds: see `simulations.study`.
        tune: values that --tuned searches for every method, to test whether the claims also hold at
            each method's best settings.
        set: changes of the recipe for all runs.
        quick: further changes of the recipe, for a short trial.
        claims: the paper's claims.
        x: key over which the picture is drawn, or "round" (see `Study.plot`).
        y: metric of the picture (see `Study.plot`).
        metrics: columns of the table (see `Study.table`).

    In a file, `extends` names a bundled study that supplies the values which the file lacks. A
    section of the file replaces the whole section of the bundled study. A claim in a file may name
    a key of the grid as `each`; the claim then stands for one claim for each of the key's values.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Label = ""
    title: str = ""
    paper: str = ""
    data: str = ""
    recipe: str = "digits"
    seeds: int = Field(default=3, ge=1)
    grid: dict[str, list[Any]] = {}
    search: dict[str, list[Any]] | None = None
    search_seeds: int = Field(default=LEAST_SEEDS, ge=LEAST_SEEDS)
    tune: dict[str, list[Any]] | None = None
    set: dict[str, Any] = {}
    quick: dict[str, Any] = {}
    claims: list[Claim] = []
    x: str | None = None
    y: str | None = None
    metrics: list[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _claim_at_each_value(cls, raw: dict[str, Any]) -> dict[str, Any]:
        claims, grid = raw.get("claims", []), raw.get("grid", {})
        return raw | {"claims": [at for claim in claims for at in _spread(claim, grid)]}


def _spread(claim: Any, grid: Mapping[str, Any]) -> list[Any]:
    """Make one claim for each value of the grid's key that a claim names as `each`."""
    if not isinstance(claim, Mapping) or "each" not in claim:
        return [claim]
    rest = dict(claim)
    key = rest.pop("each")
    if key not in grid:
        raise ValueError(f"a claim has each = {key!r}, which must be one of {list(grid)}")
    labels = [value["label"] if isinstance(value, Mapping) else value for value in grid[key]]
    return [
        rest | {"says": f"{rest['says']} at {label}", "at": rest.get("at", {}) | {key: label}}
        for label in labels
    ]


class Elsewhere(BaseModel):
    """A table or figure that no grid of runs reproduces.

    Attributes:
        title: title in one line.
        paper: the paper's table or figure.
        command: the command that makes it; empty if there is none.
        why: reason why there is no command; empty if there is one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    paper: str
    command: str = ""
    why: str = ""

    def __str__(self) -> str:
        return f"made by: {self.command}" if self.command else f"not made: {self.why}"


class Paper(BaseModel):
    """A paper whose tables and figures the studies make.

    Attributes:
        name: short name of the paper's subject.
        title: title of the paper.
        authors: authors of the paper.
        arxiv: number of the paper on arXiv.
        mechanisms: names of the paper's mechanisms.
        recipes: names of the bundled recipes with the paper's settings.
        figures: number of figures in the paper.
        tables: number of tables in the paper.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    title: str
    authors: str
    arxiv: str
    mechanisms: list[str]
    recipes: list[str]
    figures: int
    tables: int


def papers() -> dict[str, Paper]:
    """Load the papers. The key is the number with which the names of a paper's studies begin.

    Example:
        >>> papers()["004"].mechanisms[0]
        'ladp'
    """
    raw = tomllib.loads((BUNDLED / f"{_PAPERS}.toml").read_text(encoding="utf-8"))
    return {number: Paper.model_validate(entry) for number, entry in raw.items()}


def elsewhere() -> dict[str, Elsewhere]:
    """Load the entries of the papers' tables and figures that no grid of runs makes, by name.

    Example:
        >>> print(elsewhere()["003-table-3"])
        made by: fedlgm study inid
    """
    raw = tomllib.loads((BUNDLED / f"{_ELSEWHERE}.toml").read_text(encoding="utf-8"))
    return {name: Elsewhere.model_validate(entry) for name, entry in raw.items()}


def maker_of(name: str | None) -> str | None:
    """Find the name of the maker (see `fedlgm_lab.studies.tables.maker`) that has a name or that
    makes the paper's table or figure of this name. None if a grid of runs makes it, or nothing
    does.

    Example:
        >>> maker_of("003-table-3")
        'inid'
    """
    other = elsewhere().get(name or "")
    maker = name if other is None else other.command.removeprefix("fedlgm study ")
    return maker if maker in TITLES else None


def names() -> tuple[str, ...]:
    """List the names of the bundled studies.

    Example:
        >>> "004-table-2" in names()
        True
    """
    stems = {path.stem for path in BUNDLED.glob("*.toml")}
    return tuple(sorted(stems - {_ELSEWHERE, _PAPERS}))


def load(study: str) -> StudyFile:
    """Load a bundled study, or a study from a file.

    Raises:
        ConfigError: there is no such study, or the file is not TOML, names nothing to run, or has
            an unknown key.

    Example:
        >>> load("004-table-2").recipe
        'ladp-fashion-mnist'
    """
    if study in elsewhere():
        raise ConfigError(f"{study} is not a grid of runs; {elsewhere()[study]}")
    path = Path(study)
    if study in names():
        path = BUNDLED / f"{study}.toml"
    elif path.suffix != ".toml" or not path.is_file():
        hint = alternatives(
            study, (*names(), *elsewhere(), *TITLES), "a TOML file", listed="fedlgm study --list"
        )
        raise ConfigError(f"no study {study!r}; {hint}")
    raw: dict[str, Any] = {}
    for file, values in extends.chain(path, _locate, "studies"):
        raw |= {"name": file.stem} | values
    if not {"recipe", "grid"} & raw.keys():
        raise ConfigError(f"{path} names nothing to run: a study needs a recipe, a [grid], or both")
    try:
        return StudyFile.model_validate(raw)
    except ValidationError as error:
        said = "\n".join(describe_problem(item, StudyFile.model_fields) for item in error.errors())
        raise ConfigError(f"{path}: {said}") from error


def _locate(path: Path, base: str) -> Path:
    """Find the file of the bundled study `base`, which the file `path` extends."""
    if base not in names():
        raise ConfigError(
            f"{path}: `extends` names no bundled study; {alternatives(base, names())}"
        )
    return BUNDLED / f"{base}.toml"


def requested_study(
    name: str | None,
    grid: Iterable[str],
    search: Iterable[str],
    overrides: Iterable[str],
    quick: bool = False,
) -> StudyFile:
    """Make the study that a command names: a bundled study, a study in a file, or a recipe with a
    grid.

    Args:
        name: name of the study, or of a recipe if there is a grid.
        grid: "key=value,value", in addition to the study's grid; if the study has the key, these
            values replace the study's values, and a notice says so.
        search: "key=value,value", in addition to the study's search.
        overrides: "section.key=value", in addition to the study's changes.
        quick: whether to apply the study's `quick` changes, with one seed.

    Raises:
        ConfigError: as in `load` and `simulations.config.grids.parse_grid`; or there is neither a
            study nor a grid.
    """
    from simulations.config import recipe as recipes

    axes, searched = parse_grid(grid), parse_grid(search, "--search")
    if name is not None and (
        not axes or name in names() or name in elsewhere() or _is_study(Path(name))
    ):
        study = load(name)
    elif axes:
        study = StudyFile(recipe=name or recipes.DEFAULT)
    else:
        raise ConfigError(
            "a study needs --grid key=value,value, or the name of a bundled study: see fedlgm "
            "study --list"
        )
    for key in axes.keys() & study.grid.keys():
        rest = ", ".join(
            f"{other} ({len(values)} values)"
            for other, values in study.grid.items()
            if other not in axes
        )
        warnings.warn(
            Notice(
                f"--grid {key} replaces the study's own {len(study.grid[key])} values of it"
                + (f"; its other keys stay: {rest}" if rest else "")
            ),
            stacklevel=2,
        )
    changes = study.set | (study.quick if quick else {}) | dict(settings(overrides))
    return study.model_copy(
        update={
            "grid": study.grid | axes,
            "search": (study.search or {}) | searched,
            "set": changes,
            "seeds": 1 if quick else study.seeds,
        }
    )


def _is_study(path: Path) -> bool:
    """Tell whether a file holds a study and not a recipe, which has neither a grid nor claims."""
    try:
        return bool({"grid", "claims"} & tomllib.loads(path.read_text(encoding="utf-8")).keys())
    except (OSError, ValueError, RecursionError):
        return False
