"""The common form of the modules that make tables. Their figures, pages and pictures are in one
folder.

    fedlgm study inid                                # measures, and shows the tables
    fedlgm study inid --out docs/results             # the same on the pages of results
    fedlgm study lm-dp-sgd --set minutes=9           # starts no run after nine minutes

A module of this package makes tables if it has a `MAKER`. Stored figures are not measured again, so
a second call continues the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from fedlgm.errors import ConfigError
from fedlgm.wording import alternatives
from fedlgm_lab.studies.tables.pages import put
from fedlgm_lab.studies.tables.store import Kept, OutOfTimeError, Values
from fedlgm_lab.studies.tables.titles import TITLES

Pages = Mapping[str, Mapping[str, str]]
"""Path of a page, relative to the folder -> name of a table on the page -> the table as text."""


@dataclass(frozen=True)
class Maker:
    """Maker of the tables that show the figures of one file.

    Attributes:
        file: name of the file in the folder.
        texts: makes the tables from the stored figures.
        measure: measures the missing figures.
        store: class that reads and writes the file.
        pictures: name of each picture, and the function that draws it from the stored figures.
        inputs: further settings, with their descriptions.
        partial: whether there are tables before everything is measured.
    """

    file: str
    texts: Callable[[Any], Pages]
    measure: Callable[[Any], None] = lambda _: None
    store: type[Kept] | type[Values] = Kept
    pictures: Mapping[str, Callable[[Any, Path], None]] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    partial: bool = False

    def open(self, folder: Path, settings: Mapping[str, Any] | None = None) -> Kept | Values:
        """Open the stored figures in a folder.

        Raises:
            ConfigError: a setting is unknown.
        """
        described = {"minutes": "no run starts after so many minutes"} | dict(self.inputs)
        for key in settings or {}:
            if key not in described:
                known = "; ".join(f"{name} ({text})" for name, text in described.items())
                raise ConfigError(f"--set {key}: this table takes {known}")
        return self.store(folder / self.file, settings)


def place(folder: Path, page: str) -> Path:
    """Return the file of a page. If a page outside the folder does not exist, use a file in the
    folder.
    """
    beside = folder / page
    return beside if beside.exists() or ".." not in page else folder / beside.name


def load(name: str) -> Maker:
    """Return the maker with a name.

    Raises:
        ConfigError: no maker has this name.
    """
    if name not in TITLES:
        raise ConfigError(f"no table {name!r}; {alternatives(name, TITLES)}")
    module = import_module(f"fedlgm_lab.studies.tables.{name.replace('-', '_')}")
    maker: Maker = module.MAKER
    return maker


def make(name: str, folder: Path, settings: Mapping[str, Any]) -> tuple[Pages, bool]:
    """Measure the missing figures, and write the tables and pictures into the folder.

    Args:
        name: name of the maker.
        folder: folder of the stored figures and of the pages; new tables replace the tables on
            these pages.
        settings: "minutes", and the maker's inputs.

    Returns:
        The tables, and whether everything is measured.
    """
    maker, complete = load(name), True
    torch.set_num_threads(1)
    store = maker.open(folder, settings)
    try:
        maker.measure(store)
    except OutOfTimeError:
        complete = False
    pages = maker.texts(store) if complete or maker.partial else {}
    for page, parts in pages.items():
        for part, text in parts.items():
            if text:
                put(place(folder, page), part, text)
    for picture, draw in maker.pictures.items() if complete else ():
        draw(store, folder / picture)
    return pages, complete
