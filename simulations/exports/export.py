"""A finished run's model as a file for other programs, with its proven guarantee."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from fedlgm.checks import check_known
from fedlgm.data.dataset import as_numbers
from fedlgm.data.named_tables import NAME as TABLE
from fedlgm.errors import ConfigError, RunError
from fedlgm.extension.loader import is_object
from fedlgm.files import path_of, write_whole
from fedlgm.planning.layers import LayerTable
from fedlgm.training import inputs, models
from simulations.config.assembly import Assembly
from simulations.config.fingerprints import fixed_digest
from simulations.config.own import FIXED
from simulations.runs import strict_json
from simulations.runs.checkpoints import model_digest
from simulations.runs.folder import RunFolder
from simulations.runs.rows import RunSummary, excerpt
from simulations.summaries.report_types import Exported, Metadata, Protection

Format = Literal["safetensors", "pt", "onnx"]
_FOR_ONNX = ("onnx", "onnxscript")


def format_of(file: Path | str) -> Format:
    """The format that a file's suffix names.

    Raises:
        ConfigError: the suffix names no format; the message lists the formats.

    Example:
        >>> format_of("model.onnx")
        'onnx'
    """
    suffix = path_of("file", file).suffix[1:]
    if suffix not in get_args(Format):
        suffixes = ", ".join(f".{name}" for name in get_args(Format))
        hint = (
            "; torch.load reads .pt as it reads .pth"
            if suffix.lower() in ("pth", "bin", "ckpt")
            else ""
        )
        raise ConfigError(f"{file}: its suffix must name a format: {suffixes}{hint}")
    return cast(Format, suffix)


def load_model(run: Path | str, module: nn.Module | None = None) -> nn.Module:
    """The model of a finished run, in evaluation mode.

    Args:
        run: run folder.
        module: a model of the same architecture into which the weights are loaded, changed in
            place; by default the recipe's own model is built. It is needed if the run was given its
            model or data as Python objects.

    Raises:
        RunError: the folder is not a run's, the run is not finished, or its model is not the model
            of its result.
        ConfigError, DataError: the recipe's model cannot be made here, or `module` has other frozen
            values.

    Example:
        >>> import simulations, tempfile
        >>> run = tempfile.mkdtemp() + "/run"
        >>> _ = simulations.simulate("digits", overrides=["federation.rounds=1"], run_dir=run)
        >>> load_model(run)(torch.zeros(1, 1, 8, 8)).shape
        torch.Size([1, 10])
    """
    folder = RunFolder.open(run)
    return load_verified(folder, folder.verified_result(), module)


def metadata(run: Path | str) -> Metadata:
    """Metadata of a run's model: recipe (TOML), epsilon, guarantee, ledger head, SHA-256 of the
    flat model.

    `labels` are the names of the classes, in the order of the model's outputs, if the data have
    names. `columns` are the columns of a table, in the order of the model's inputs, with the
    constants that standardised them.

    Raises:
        RunError: the folder is not a run's, or the run is not finished.
        LedgerError: the ledger is damaged, or does not match recipe, checkpoints and result.
    """
    folder = RunFolder.open(run)
    text = folder.recipe_file.read_text(encoding="utf-8")
    return model_metadata(folder, folder.verified_result(), text)


def model_metadata(
    folder: RunFolder, protection: Mapping[str, Any], recipe: str, module: nn.Module | None = None
) -> Metadata:
    """Metadata of a model: its protection and recipe, and the public description of its data from
    its run's folder.

    Args:
        folder: the run's folder.
        protection: values that state the model's protection. Other values in it are left out.
        recipe: the recipe that is stated (TOML).
        module: the model, if the metadata say whether it is linear.
    """
    statements = excerpt(Protection.__annotations__, protection)
    told = cast(Metadata, {"made_by": "fedlgm", **statements, "recipe": recipe})
    told["task"] = str(folder.recipe().task.name)
    labels, columns = folder.labels(), folder.provenance.read().get("columns")
    if labels is not None:
        told["labels"] = labels
    if columns is not None:
        told["columns"] = columns
    if module is not None and linear_of(models.original(module)) is not None:
        told["coefficients"] = "linear"
    return told


def linear_of(module: nn.Module) -> nn.Linear | None:
    """The layer of a model that is one linear layer on its flattened inputs; None for other models.

    Example:
        >>> linear_of(nn.Sequential(nn.Flatten(), nn.Linear(3, 2)))
        Linear(in_features=3, out_features=2, bias=True)
        >>> linear_of(nn.Sequential(nn.Linear(3, 2), nn.Tanh())) is None
        True
    """
    layers = [*module] if type(module) is nn.Sequential else [module]
    layers = [layer for layer in layers if type(layer) not in (nn.Flatten, nn.Identity)]
    return layers[0] if len(layers) == 1 and type(layers[0]) is nn.Linear else None


def export(
    run: Path | str,
    format: Format = "safetensors",
    out: Path | str | None = None,
    module: nn.Module | None = None,
    example: inputs.Arrays | None = None,
) -> Exported:
    """Write a finished run's model to one file.

    The stored `state_dict` belongs to the recipe's model and uses PyTorch's names: trained
    parameters, frozen parameters and buffers. Metadata (see `metadata`) are inside a safetensors or
    ONNX file. A .pt file cannot hold them, so they are in a JSON file of the same name.

    The adapters of a model (LoRA) are exported to a separate folder (see
    `simulations.exports.adapter_files`).

    Args:
        run: run folder.
        format: "safetensors"; "pt", which `torch.load(..., weights_only=True)` reads; or "onnx", a
            graph that runs without PyTorch, with a free batch size.
        out: file to write or a folder; by default `model.<format>` in the run folder. An existing
            model is replaced.
        module: see `load_model`.
        example: inputs of two examples, [2, ...] (a tuple of several), with which "onnx" traces the
            model; by default test examples. They are needed if the run was given its data as a
            Python object.

    Returns:
        `file`, `format`, `bytes`, `metadata_file` (None if the metadata are inside the file) and
        the metadata without the recipe.

    Raises:
        ConfigError: the format is unknown, the file has the suffix of another format, or packages
            that "onnx" needs are missing.
        RunError: the file cannot be written, PyTorch cannot express the model as ONNX, or as in
            `load_model`.
        LedgerError: as in `metadata`.
    """
    check_known("export format", format, Format)
    missing = [package for package in _FOR_ONNX if find_spec(package) is None]
    if format == "onnx" and missing:
        raise ConfigError(
            f"format 'onnx' needs {' and '.join(missing)}: pip install 'fedlgm[onnx]'"
        )
    target = path_of("run", run) / f"model.{format}" if out is None else path_of("out", out)
    if target.is_dir():
        target = target / f"model.{format}"
    folder = RunFolder.open(run)
    beside = target.with_suffix(".json") if format == "pt" else None
    _refuse_other_files(target, beside, folder.path, f"model.{format}")
    if target.suffix != f".{format}":
        raise ConfigError(
            f"out: {target.name} would hold {format}: give a name that ends in .{format}, or the "
            "format of its suffix"
        )
    result = folder.verified_result()
    module = load_verified(folder, result, module)
    told = model_metadata(folder, result, folder.recipe_file.read_text(encoding="utf-8"), module)
    original_state = models.original(module).state_dict()
    state = {name: tensor.detach().clone().contiguous() for name, tensor in original_state.items()}
    if format == "safetensors":
        write_whole(target, lambda path: save_file(state, path, metadata=texts(told)))
    elif beside is not None:
        write_whole(target, lambda path: torch.save(state, path))
        strict_json.write(beside, told)
    else:
        _write_onnx(target, module, _example(Path(run)) if example is None else example, told)
    return export_summary(target, format, told, beside)


def _refuse_other_files(target: Path, beside: Path | None, run: Path, usual: str) -> None:
    """Refuse to replace other files than exports, such as a run's recipe, ledger or checkpoint."""
    inside = (
        run.resolve() in target.resolve().parents and target.resolve() != (run / usual).resolve()
    )
    lost = target if target.exists() and (inside or target.suffix != Path(usual).suffix) else None
    if lost is None and beside is not None and beside.exists() and not target.exists():
        lost = beside
    if lost is not None:
        raise RunError(f"{lost} exists and is not an exported model: choose another file")


def export_summary(file: Path, format: str, told: Metadata, beside: Path | None = None) -> Exported:
    """The description of a written file. It has only the metadata with short values."""
    return {
        "file": str(file),
        "format": format,
        "bytes": file.stat().st_size,
        "metadata_file": None if beside is None else str(beside),
        **cast(Protection, excerpt(Protection.__annotations__, told)),
    }


def load_verified(
    folder: RunFolder, result: RunSummary, module: nn.Module | None = None
) -> nn.Module:
    """See `load_model`. The run must have been checked.

    Raises:
        RunError: the last checkpoint is not the result's model.
        ConfigError: the run's objects are missing, or `module` has other frozen values.
    """
    run, recipe = folder.path, folder.recipe()
    if module is None:
        for key, name in (("model", recipe.model.name), ("data", recipe.data.name)):
            if is_object(name):
                raise ConfigError(
                    f"{run} was given its {key} {name!r} as a Python object, which a run folder "
                    "does not hold: pass a module of the same architecture, as in "
                    "simulations.exports.export.export(run, module=MyNet())"
                )
        module = Assembly(recipe).model.module()
    else:
        module = models.plain(module)
        fixed = folder.provenance.read().get("objects", {}).get(FIXED)
        if fixed is not None and fixed_digest(module) != fixed:
            raise ConfigError(
                f"the frozen parameters and buffers of {type(module).__name__} are not those with "
                f"which {run} was trained; a run folder does not hold them: pass the module that "
                "the run was given"
            )
    layers = LayerTable.from_module(module, recipe.mechanism.group_by)
    model = folder.checkpoints.model(layers)
    if model is None or model_digest(model) != result["model_sha256"]:
        raise RunError(
            f"the last checkpoint of {run} is not the model of its result, "
            f"{result['model_sha256']}: restore `checkpoints/` from a backup"
        )
    layers.load_(module, model)
    return module.eval()


def texts(values: Metadata) -> dict[str, str]:
    """Metadata as text for the formats, with figures as JSON."""
    return {
        name: value if isinstance(value, str) else strict_json.dumps(value)
        for name, value in values.items()
    }


def _example(run: Path) -> inputs.Arrays:
    """Inputs of two test examples of a run; zeros if it has none."""
    recipe = RunFolder.open(run).recipe()
    if is_object(recipe.data.name):
        raise ConfigError(
            f"{run} was given its data {recipe.data.name!r} as a Python object, which a run folder "
            "does not hold: pass inputs of two examples, as in "
            "simulations.exports.export.export(run, 'onnx', module=net, example=x[:2])"
        )
    data = Assembly(recipe).data
    if recipe.data.name == TABLE and recipe.data.test_file is None:
        return np.zeros((2, *data.in_shape), np.float32)
    return inputs.take(data.dataset.test_x, slice(2))


def _write_onnx(target: Path, module: nn.Module, example: inputs.Arrays, told: Metadata) -> None:
    traced = inputs.tensors(inputs.each(lambda part: as_numbers(part, "example"), example))
    arguments = inputs.parts(traced)
    batch = tuple({0: torch.export.Dim("batch")} if part.ndim else None for part in arguments)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the exporter about itself
            program = torch.onnx.export(
                module, arguments, dynamo=True, dynamic_shapes=batch, verbose=False
            )
    except Exception as error:  # the exporter's exceptions have no common type
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RunError(
            f"PyTorch cannot express {type(module).__name__} as ONNX: {reason}"
        ) from error
    assert program is not None
    program.model.metadata_props.update(texts(told))
    write_whole(target, lambda path: program.save(str(path), external_data=False))
