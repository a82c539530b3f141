"""Creation of a run's folder, and its removal if the run is refused."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from fedlgm.errors import DiskError, RunError
from fedlgm.files import PUBLIC, draft_folder, explain_failure, is_used, write_durably
from simulations.config.recipe import Recipe
from simulations.runs.folder import RunFolder


def create(path: Path | None, recipe: Recipe) -> RunFolder:
    """Make a new folder, which contains its recipe from the start, and the folders above it.

    Args:
        path: the folder; None for a folder of the default name.
        recipe: the run's recipe.

    Raises:
        RunError: the folder exists and is not empty. Nothing is changed.
        DiskError: the folder cannot be created.
    """
    stem, numbers = f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}", count(2)
    name = stem
    while path is None:
        default = Path("runs") / name
        try:
            return create(default, recipe)
        except RunError:  # a run that began in the same second has this name
            if not default.exists():
                raise
        name = f"{stem}-{next(numbers)}"
    refuse_existing(path)
    missing = tuple(parent for parent in path.parents if not parent.exists())
    try:
        with draft_folder(path) as draft:
            (draft / "checkpoints").mkdir(parents=True)
            write_durably(RunFolder(draft).recipe_file, recipe.to_toml().encode(), PUBLIC)
    except OSError as error:
        raise DiskError(
            explain_failure(f"cannot create the run folder {path}", error, "choose another folder")
        ) from error
    return RunFolder(path, missing)


def refuse_existing(path: Path) -> None:
    """Raise RunError if `path` exists and is not an empty folder."""
    if is_used(path):
        raise RunError(
            f"{path} already exists: choose another folder (--run-dir, run_dir=), or continue the "
            f"run in it (--resume {path}, simulations.resume)"
        )


@contextmanager
def removed_if_refused(folder: RunFolder, *, asks_nodes: bool = False) -> Iterator[None]:
    """Remove a folder that `create` made, and the parent folders made with it, if the block raises
    before the run has charged a round.

    After an interruption, or after an error of a run that `RunFolder.open` returned, the folder is
    kept. Disk errors of the block are raised as in `RunFolder.writing`.

    Args:
        folder: the run's folder.
        asks_nodes: whether the clients are nodes with ledgers, which charge a round before the run
            does. An empty ledger then also keeps the folder.
    """
    try:
        with folder.writing():
            yield
    except Exception:
        if (
            folder.made_with is not None
            and not folder.begun()
            and not (asks_nodes and folder.ledger_file.exists())
        ):
            shutil.rmtree(folder.path, ignore_errors=True)
            for parent in folder.made_with:
                with suppress(OSError):  # another run is in the parent folder
                    parent.rmdir()
        raise
