"""Provenance of a run, written to its folder: clients, versions and users' code."""

from __future__ import annotations

from fedlgm.cache import version_of
from fedlgm.extension.loader import is_reference, source_of
from fedlgm.training import instruction_set, models
from simulations.config.assembly import Assembly
from simulations.config.fingerprints import array_digest
from simulations.config.recipe import Recipe
from simulations.runs.rows import Provenance, Source
from strategies.nodes import Nodes

_PACKAGES = ("fedlgm", "flwr", "torch", "numpy", "dp-accounting", "ray")


TRAINING_FILE = "training file"
FILES = {
    "weights": ("model", "weights"),
    TRAINING_FILE: ("data", "file"),
    "test file": ("data", "test_file"),
}
"""Name of a file among the sources -> section and key of the recipe that name the file."""


def provenance_of(assembly: Assembly, nodes: Nodes) -> Provenance:
    """The provenance of a run.

    Args:
        assembly: the run's objects.
        nodes: assignment of nodes to clients.
    """
    provenance: Provenance = {
        "clients": "simulated clients" if nodes.simulated else "real nodes",
        "objects": assembly.fingerprints(),
        "sources": sources(assembly.recipe),
        "layers": dict(
            zip(assembly.model.layers.names, assembly.model.layers.sizes.tolist(), strict=True)
        ),
        "versions": {name: version for name in _PACKAGES if (version := version_of(name))},
    }
    dataset, recipe = assembly.data.dataset, assembly.recipe
    if nodes.simulated:
        provenance["trained_by"] = _trained_by(assembly)
        source, division = recipe.data.name + recipe.data.partition, assembly.data.partition
        if ":" in source or "folder" in source:  # the source may give other rows later
            provenance["rows"] = array_digest(
                *dataset.parts().values(), division.order, division.offsets
            )
    labels = getattr(assembly.data.task, "intervals", lambda: dataset.labels)()
    if dataset.columns is not None:
        provenance["columns"] = [*dataset.columns]
    # A site that is itself the unit of protection, or a part of one, has no name in a public file.
    if dataset.sites and (recipe.unit, recipe.data.partition) == ("example", "natural"):
        provenance["sites"] = [*dataset.sites]
    if labels:
        provenance["labels"] = [*labels]
    return provenance


def _trained_by(assembly: Assembly) -> str:
    if assembly.recipe.training.kernel == "native":
        return f"the compiled kernel ({instruction_set()})"
    return "PyTorch" + (f" ({assembly.no_kernel})" if assembly.no_kernel else "")


def sources(recipe: Recipe) -> dict[str, Source]:
    """File and SHA-256 of the source of everything that the recipe names as
    "package.module:name".
    """
    named = {
        "model": recipe.model.name,
        "data": recipe.data.name,
        "partition": recipe.data.partition,
        "task": recipe.task.name,
        "mechanism": recipe.mechanism.name,
        "server_optimizer": recipe.federation.server_optimizer,
    }
    entries: dict[str, Source] = {}
    for what, name in named.items():
        if is_reference(name):
            file, digest = source_of(name, what)
            entries[what] = {"name": name, "file": str(file), "sha256": str(digest)}
    for what, (section, key) in FILES.items():
        path = getattr(getattr(recipe, section), key)
        if path is not None:
            entries[what] = {
                "name": f"{section}.{key}",
                "file": path,
                "sha256": models.digest_of_file(path),
            }
    return entries
