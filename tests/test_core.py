"""The core, which every run needs, can be read alone: only registries import a variant, and nothing
imports a tool."""

from __future__ import annotations

from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from fedlgm.package_conflicts import PACKAGES as ALL
from tests.docs.test_sizes import nodes_of, tree_of

ROOT = Path(__file__).parents[1]
PACKAGES = ("fedlgm", "clients", "strategies", "simulations")
_TOOLS = {
    "fedlgm": "check extension.testing papers privacy.floor privacy.selection",
    "simulations": "api arguments cli config.grids config.schema ending entry exports figures live pretrain progress "
    "projects shell signals standardise summaries tables",
}
"""Modules that are built on runs."""
_VARIANTS = {
    "fedlgm.aggregation.kernels": "triton_kernels triton_noise",
    "fedlgm.data": "bundled encoding images lazy named_tables site_files sources text",
    "fedlgm.mechanisms": "adaptive alternate dp_sgd group_noise inid ladp ladp_frame ladp_scores "
    "layer_vote lm_dp_sgd profiles risk_aware voted_filling water_filling",
    "fedlgm.privacy": "grid random_allocation renyi repetition",
    "fedlgm.training": "apart example_level fedprox fedsgd mixed native recorded schedule "
    "scheduled vectorized",
    "fedlgm.training.models": "adapters arrays convolutional huggingface residual text weights",
    "fedlgm.training.tasks": "binary causal_lm hazards next_token ranked regression",
    "clients": "example_level mod published_client users",
    "strategies": "private_fedavg published_strategy yogi",
    "simulations.config": "example_level user_level",
    "simulations.engines": "cluster flower flower_command flower_entry flower_processes "
    "processes ray ray_engine superlink",
    "simulations.runs.trackers": "mlflow tensorboard values wandb",
}
"""Exchangeable parts, in files that only a registry names."""
REGISTRIES = {
    *(
        "fedlgm.data",
        "fedlgm.mechanisms",
        "fedlgm.privacy.accountants",
        "fedlgm.training.kinds",
        "fedlgm.training.models",
        "fedlgm.training.tasks",
    ),
    *("clients.choice", "simulations.config.recipe", "simulations.engines", "strategies"),
    "strategies.server_optimizer",
}
_DEFAULTS = {
    "clients": "layerwise",
    "fedlgm.data": "dataset division partition pixels tables users",
    "fedlgm.mechanisms": "layerwise_gaussian mechanism options private_plans",
    "fedlgm.privacy": "events guarantee",
    "fedlgm.training": "apart base choice devices models optimizers sequential tasks",
    "fedlgm.training.models": "built copies dense requirements",
    "fedlgm.training.tasks": "classification evaluation set_metrics task",
    "simulations.config": "client_level extends fixed_noise kept_releases named_sections overrides "
    "public_seed sections statement_section unit validation_messages",
    "simulations.engines": "base",
    "strategies": "cohort layerwise nodes releaser replies server_optimizer",
}
"""Modules of the core that registries import."""
MOST_NODES = 112_900


def _listed(names: dict[str, str]) -> list[str]:
    return [f"{package}.{name}" for package, listed in names.items() for name in listed.split()]


TOOLS, VARIANTS, DEFAULTS = _listed(_TOOLS), _listed(_VARIANTS), _listed(_DEFAULTS)


def _within(module: str, names: list[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, cache_dir=None)


@pytest.fixture(scope="module")
def core(graph: grimp.ImportGraph) -> list[str]:
    return sorted(module for module in graph.modules if not _within(module, TOOLS + VARIANTS))


def test_every_name_is_that_of_a_module(graph: grimp.ImportGraph) -> None:
    assert {*TOOLS, *VARIANTS, *DEFAULTS, *REGISTRIES} <= graph.modules


def test_the_core_imports_variants_only_in_registries_and_no_tool(
    graph: grimp.ImportGraph, core: list[str]
) -> None:
    imports = [
        (module, other)
        for module in core
        for other in graph.find_modules_directly_imported_by(module)
    ]
    assert [(module, other) for module, other in imports if _within(other, TOOLS)] == []
    listing = {module for module, other in imports if _within(other, VARIANTS)}
    assert listing == REGISTRIES, (
        "only a registry imports a variant; a new registry is listed in REGISTRIES"
    )


def test_a_registry_imports_only_its_own_variants_and_defaults(graph: grimp.ImportGraph) -> None:
    for registry in REGISTRIES:
        package = registry if registry in _DEFAULTS else registry.rpartition(".")[0]
        found = {*graph.find_modules_directly_imported_by(registry)}
        inside = {other for other in found if _within(other, [package])}
        unlisted = {other for other in inside if not _within(other, VARIANTS + DEFAULTS)}
        assert not unlisted, (
            f"{registry} imports {unlisted}: list it in _VARIANTS, or in _DEFAULTS if all runs "
            "need it"
        )
        assert not {other for other in found - inside if _within(other, VARIANTS)}, registry


def test_no_modules_import_each_other_even_for_their_types() -> None:
    graph = grimp.build_graph(*ALL, cache_dir=None)
    TopologicalSorter(
        {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    ).prepare()


def test_the_core_is_small_enough_to_be_read(core: list[str]) -> None:
    nodes = 0
    for module in core:
        file = ROOT / Path(*module.split("."))
        nodes += nodes_of(
            tree_of(file / "__init__.py" if file.is_dir() else file.with_suffix(".py"))
        )
    assert nodes <= MOST_NODES
