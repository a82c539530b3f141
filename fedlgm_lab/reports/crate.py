"""A finished run as an RO-Crate: its public files in one archive, described in JSON-LD.

The format is RO-Crate (Soiland-Reyes et al. 2022) with the profile Process Run Crate 0.5. Funders
ask for RO-Crates, and repositories such as Zenodo archive them.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fedlgm import __version__
from fedlgm.errors import ConfigError
from fedlgm.extension.loader import is_object
from fedlgm.files import explain_failure, path_of, write_whole
from fedlgm_lab.reports.report import write_report
from fedlgm_lab.statement.statement_command import write
from simulations.exports.export import export
from simulations.runs.folder import RunFolder
from simulations.runs.rows import RunSummary
from simulations.summaries.terminal import number

PROFILE = "https://w3id.org/ro/wfrun/process/0.5"
_FILES = {
    "recipe.toml": ("The recipe", "application/toml"),
    "result.json": ("Figures of the finished run", "application/json"),
    "metrics.jsonl": ("Public figures of every round", "application/jsonl"),
    "provenance.json": ("Versions, layers and fingerprints of objects", "application/json"),
    "ledger.sqlite": ("Charged releases, as a hash chain", "application/vnd.sqlite3"),
    "report.html": ("Report of the run", "text/html"),
}
_STATED = ("unit", "relation", "trust", "delta", "guarantee", "attack")


def write_crate(run: Path | str, file: Path | str, model: Path | str | None = None) -> Path:
    """Write a finished run's public files, its model and its privacy statement as an RO-Crate.

    The archive holds nothing from the run's `private/` folder.

    Args:
        run: run folder.
        file: archive to write; its suffix is .zip.
        model: the model's file (.safetensors), as `RunResult.export` wrote it. It is needed if the
            run was given its model as a Python object; otherwise the model is exported here.

    Returns:
        The archive.

    Raises:
        ConfigError: the suffix is not .zip, the package `rocrate` is not installed, `model` is
            needed but missing, or `model` belongs to another run.
        RunError: the folder is not a run's, the run is not finished, or a file cannot be written.
        LedgerError: the ledger does not match the recipe, the checkpoints or the result.

    Example:
        >>> import simulations, tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = simulations.simulate("digits", overrides=["federation.rounds=1"], run_dir=folder / "run")
        >>> write_crate(folder / "run", folder / "crate.zip").name
        'crate.zip'
    """
    target = path_of("file", file)
    if target.suffix != ".zip":
        raise ConfigError(f"{target}: an RO-Crate is written as an archive that ends in .zip")
    try:
        from rocrate.rocrate import ROCrate
    except ImportError as error:
        raise ConfigError(
            "an RO-Crate needs the package rocrate: pip install 'fedlgm[crate]'"
        ) from error
    folder = RunFolder.open(run)
    result = write_report(folder.path)
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "model.safetensors"
        if model is not None:
            _copy_model(path_of("model", model), copy, result["model_sha256"])
        elif is_object(folder.recipe().model.name):
            raise ConfigError(
                f"{run} was given its model as a Python object, which a run folder does not hold: "
                "write it with result.export('model.safetensors') in Python, and name the file "
                "(--model model.safetensors)"
            )
        else:
            export(folder.path, "safetensors", copy)
        statement = Path(temporary) / "statement.md"
        statement.write_text(write(folder.path, "md"), encoding="utf-8")
        crate = ROCrate()
        _describe(crate, folder, result, copy, statement)
        write_whole(target, crate.write_zip)
    return target


def _copy_model(file: Path, copy: Path, sha256: str) -> None:
    """Copy an exported model whose metadata name the run's model."""
    try:
        with safe_open(str(file), framework="np") as stored:
            told = stored.metadata() or {}
        shutil.copyfile(file, copy)
    except (OSError, SafetensorError) as error:
        what = f"{file} is not an exported model (.safetensors)"
        raise ConfigError(explain_failure(what, error)) from error
    if told.get("model_sha256") != sha256:
        raise ConfigError(f"{file} is not the model of this run, {sha256}: export it again")


def _describe(
    crate: Any, folder: RunFolder, result: RunSummary, model: Path, statement: Path
) -> None:
    """Add the files and the description of the run to an empty crate."""
    from rocrate.model import ContextEntity, SoftwareApplication

    stated: dict[str, Any] = {**result["statement"]}
    crate.name = f"fedlgm run: {result['recipe']}"
    crate.description = (
        f"{stated.get('purpose', 'Federated training')}. {stated['guarantee']}; epsilon "
        f"{number(stated['epsilon'])} at delta {stated['delta']:g} for one {stated['unit']}"
    )
    crate.license = stated.get("license", "not stated")
    crate.root_dataset["conformsTo"] = {"@id": PROFILE}
    crate.add(ContextEntity(crate, PROFILE, {"@type": "CreativeWork", "name": "Process Run Crate"}))
    parts = {
        name: crate.add_file(
            folder.path / name, properties={"name": title, "encodingFormat": encoding}
        )
        for name, (title, encoding) in _FILES.items()
    }
    trained = crate.add_file(model, properties={"name": "The model"})
    crate.add_file(
        statement, properties={"name": "Privacy statement", "encodingFormat": "text/markdown"}
    )
    crate.mainEntity = trained
    figures = {name: stated[name] for name in _STATED}
    figures |= {"epsilon": number(stated["epsilon"]), "model_sha256": result["model_sha256"]}
    crate.root_dataset["variableMeasured"] = [
        crate.add(
            ContextEntity(
                crate, f"#{name}", {"@type": "PropertyValue", "name": name, "value": value}
            )
        )
        for name, value in figures.items()
    ]
    software = crate.add(
        SoftwareApplication(crate, "#fedlgm", {"name": "fedlgm", "softwareVersion": __version__})
    )
    crate.add_action(
        software,
        identifier="#run",
        object=[parts["recipe.toml"]],
        result=[trained, *(part for name, part in parts.items() if name != "recipe.toml")],
        properties={"name": f"Private training: {result['recipe']}"},
    )
