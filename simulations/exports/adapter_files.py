"""A finished run's adapters as a folder that `peft` loads, with their proven guarantee."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn

from fedlgm.errors import ConfigError, RunError
from fedlgm.files import PUBLIC, explain_failure, path_of, write_durably
from fedlgm.planning.layers import adapted_layer, factor_of
from fedlgm.training import models
from fedlgm.training.models.adapters import LowRank
from simulations.config.fingerprints import fixed_digest
from simulations.exports.export import export_summary, load_verified, model_metadata, texts
from simulations.runs import strict_json
from simulations.runs.folder import RunFolder
from simulations.summaries.report_types import Exported

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."


def export_adapter(
    run: Path | str, out: Path | str | None = None, module: nn.Module | None = None
) -> Exported:
    """Write the adapters of a finished run, without the base, in the format of `peft`.

    `peft.PeftModel.from_pretrained(base, out)` reads the folder. The safetensors file's metadata
    hold epsilon, guarantee, recipe and more (see `simulations.exports.export.metadata`), and as
    `base_sha256` the hash of all frozen values.

    Args:
        run: run folder.
        out: folder to write into; by default `adapter` in the run folder.
        module: see `simulations.exports.export.load_model`.

    Returns:
        The values of `simulations.exports.export.export`.

    Raises:
        ConfigError: the model has no adapters of peft or `LowRank`, or as in `load_model`.
        RunError: the run has not changed any adapter, `out` is not a folder, or as in `load_model`.
    """
    folder = path_of("run", run) / "adapter" if out is None else path_of("out", out)
    source = RunFolder.open(run)
    result = source.verified_result()
    told = model_metadata(source, result, source.recipe_file.read_text(encoding="utf-8"))
    loaded = load_verified(source, result, module)
    adapters = {
        name for name, p in loaded.named_parameters() if p.requires_grad and factor_of(name)
    }
    if not adapters:
        raise ConfigError(
            f"{run}: its model has no adapters (parameters named lora_A and lora_B): export it as "
            "a whole"
        )
    if adapters <= set(result.get("unmoved", ())):
        raise RunError(
            f"{run} has not changed any adapter: none of its rounds released one, so there is "
            "nothing to write"
        )
    texts_of = texts(told) | {"base_sha256": fixed_digest(loaded), "format": "pt"}
    model = models.original(loaded)
    tensors, config = _of_peft(model) if hasattr(model, "peft_config") else _of_low_rank(run, model)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot write the adapter into {folder}"
        raise RunError(explain_failure(what, error, "choose another folder")) from error
    state = {key: value.detach().contiguous().clone() for key, value in tensors.items()}
    write_durably(folder / WEIGHTS, save(state, texts_of), PUBLIC, shared=True)
    strict_json.write(folder / CONFIG, config)
    return export_summary(folder / WEIGHTS, "peft", told)


def _of_peft(model: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and configuration as `peft` would save them."""
    from peft import get_peft_model_state_dict

    config = model.peft_config[model.active_adapter].to_dict()
    plain = {
        key: sorted(value) if isinstance(value, set) else value for key, value in config.items()
    }
    return get_peft_model_state_dict(model), plain | {"inference_mode": True}


def _of_low_rank(run: Path | str, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The same for `LowRank` layers. Other trained modules are saved completely."""
    adapted = {name: child for name, child in model.named_modules() if isinstance(child, LowRank)}
    if not adapted:
        raise ConfigError(
            f"{run}: the scale of its model's adapters is not known, because they belong neither "
            "to peft nor to fedlgm.training.models.adapters.LowRank: export it as a whole"
        )
    ranks = {name: child.rank for name, child in adapted.items()}
    alphas = {name: child.alpha for name, child in adapted.items()}
    tensors: dict[str, Tensor] = {}
    modules_to_save: dict[str, None] = {}
    for name, parameter in model.named_parameters():
        if adapted_layer(name) in adapted and factor_of(name):
            tensors[_PREFIX + name] = parameter
        elif parameter.requires_grad:
            modules_to_save[adapted_layer(name)] = None
    for name in modules_to_save:
        tensors |= {
            f"{_PREFIX}{name}.{key}": value
            for key, value in model.get_submodule(name).state_dict().items()
        }
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": next(iter(ranks.values())),
        "lora_alpha": next(iter(alphas.values())),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": list(adapted),
        "modules_to_save": list(modules_to_save) or None,
    }
    return tensors, config
