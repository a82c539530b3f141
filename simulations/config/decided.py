"""Choices that a recipe leaves to the machine, made once at the start because trainers differ in
the last bits.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from fedlgm.errors import ConfigError, DataError
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.training import ClientTask, devices, fastest
from fedlgm.training.devices import torch_threads
from simulations.config.assembly import Assembly
from simulations.config.recipe import Recipe

_TRIED = 8  # number of public examples on which the compiled kernel is tried
_BATCHES = 4  # number of batches of public examples for each client that is timed
SIDE_BY_SIDE = 16
"""Number of clients that a GPU trains at once. With more clients, padding costs more time than is
gained (docs/results/gpu.md).
"""


def resolve_hardware(recipe: Recipe) -> Recipe:
    """The recipe with this machine's device and noise backend, so that a run's recipe names its
    noise generator.

    Raises:
        ConfigError: the device or backend is not available on this machine.
    """
    device = devices.resolve(recipe.training.device)
    backend = devices.resolve_noise(recipe.privacy.noise_backend, device)
    return recipe.with_values(training={"device": str(device)}, privacy={"noise_backend": backend})


def resolve_auto(assembly: Assembly, workers: int) -> Assembly:
    """The run on the same data, with every "auto" of [training] replaced by this machine's choice.

    If clients train on an accelerator, "auto" is also the default of `training.vectorize`, and a
    block has at least as many clients as are trained at once.

    Args:
        assembly: the run's objects.
        workers: processes that train.
    """
    if assembly.model.device.type != "cpu" and assembly.recipe.protects.side_by_side:
        assembly = _for_accelerator(assembly)
    section = assembly.recipe.training
    if not section.undecided:
        return assembly
    vectorized, compiled = _trainer(assembly, workers)
    kernel: Literal["native"] | None = "native" if section.kernel == "native" else None
    refused = None
    if section.kernel == "auto":
        refused = _refusal(assembly)
        kernel = None if refused else "native"
    how = {"vectorize": "on" if vectorized else "off", "compile": compiled, "kernel": kernel}
    return Assembly(
        assembly.recipe.with_values(training=how),
        assembly.own,
        no_kernel=refused,
        divided=assembly.data.division,
    )


def _for_accelerator(assembly: Assembly) -> Assembly:
    """The run with blocks of as many clients as an accelerator trains at once."""
    recipe, training = assembly.recipe, assembly.recipe.training
    width = training.width or max(SIDE_BY_SIDE, recipe.run.block_size)
    changed: dict[str, object] = {"width": width}
    if "vectorize" not in training.model_fields_set and training.kernel != "native":
        changed["vectorize"] = "auto"
    recipe = recipe.with_values(
        training=changed, run={"block_size": max(recipe.run.block_size, width)}
    )
    return Assembly(recipe, assembly.own, divided=assembly.data.division)


def _trainer(assembly: Assembly, workers: int) -> tuple[bool, bool]:
    """Whether clients are trained side by side, and whether this training is compiled. A short
    measurement decides both.
    """
    section, run, federation = (
        assembly.recipe.training,
        assembly.recipe.run,
        assembly.recipe.federation,
    )
    compiling = (False, True) if section.compile == "auto" else (section.compile,)
    choices = {f"vectorised, compiled: {c}": (True, c) for c in compiling}
    if section.vectorize != "on":
        choices = choices if assembly.model.trainer_kind.vectorized is not None else {}
        choices = {"sequential": (False, False)} | (choices if section.vectorize == "auto" else {})
    winner = next(iter(choices))
    if len(choices) > 1:
        makers = {
            name: partial(assembly.model.trainer, *choice) for name, choice in choices.items()
        }
        clients = federation.rounds * federation.share * federation.clients
        with torch_threads(run.threads):
            # on a GPU workers wait for one another
            workers = workers if assembly.model.device.type == "cpu" else 1
            blocks = max(1.0, clients / run.block_size / workers)
            tasks = partial(_blocks, assembly, run.block_size)
            winner, _ = fastest(makers, assembly.model.initial(), tasks, blocks=blocks)
    return choices[winner]


def _refusal(assembly: Assembly) -> str | None:
    """The reason why the compiled kernel cannot train this run on this machine; None if the kernel
    has trained on a few examples.

    The kernel is faster than PyTorch for every model that it knows (docs/results/performance.md).
    If it bounds single examples, it is faster for small models. Therefore nothing is timed. The
    choice, and with it the bits of a run, depend only on the recipe and on whether the machine has
    the kernel.
    """
    section = assembly.recipe.training
    if assembly.model.device.type != "cpu":
        return f"training.device is {str(assembly.model.device)!r}"
    if section.vectorize != "off":
        return f"training.vectorize is {section.vectorize!r}"
    # On public examples, because the reason becomes a part of the run's public provenance.
    x, y = assembly.data.public_examples(slice(_TRIED))
    try:
        with torch_threads(assembly.recipe.run.threads):
            assembly.recipe.protects.try_kernel(assembly.model, x, y, assembly.privacy.first_plan)
    except (ConfigError, DataError) as error:
        return str(error)
    return None


def _blocks(assembly: Assembly, count: int) -> list[ClientTask]:
    """Clients that hold a few batches of public test examples, with the layers that the first plan
    trains.

    The choice becomes part of the public recipe, so private examples must not be timed.
    """
    section = assembly.recipe.training
    x, y = assembly.data.public_examples(slice(_BATCHES * section.batch_size))
    keys, trained = KeyRing.from_seed(0), assembly.privacy.first_plan().trained
    orders = (keys.torch_generator(Purpose.PROBE, client) for client in range(count))
    return [ClientTask(x, y, order, section.epochs, trained) for order in orders]
