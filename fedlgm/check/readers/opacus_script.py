"""Settings of a run that can be read from a script around its call of Opacus's `make_private`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from fedlgm.check.source import UNREAD, Source, call_name, receiver
from fedlgm.check.verdict import Status, Verdict

_SEEDS = ("manual_seed", "manual_seed_all", "seed_everything", "set_seed")
_SEEDED = (
    *("", "torch", "torch.cuda", "torch.random", "torch.cuda.random", "torch.default_generator"),
    *("pl", "L", "lightning", "pytorch_lightning", "lightning.pytorch", "lightning.fabric"),
    *("transformers", "accelerate", "accelerate.utils"),
)
_NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")
_FIXES = ("fix", "fix_and_validate", "convert_batchnorm_modules")
_OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adadelta", "Adamax")
_ATTACHED = {
    **{"batch_size": "batch_size", "expected_batch_size": "batch_size"},
    **{"sample_size": "population", "alphas": "orders"},
}
_SCHEDULES = ("ExponentialNoise", "LambdaNoise", "StepNoise")


def opacus_facts(
    source: Source, call: ast.Call, reading: list[Verdict], runs: bool = False
) -> dict[str, Any]:
    """Return the settings that the script's loader, loops and seeds, and its use of the returned
    objects, show.

    Args:
        source: the script.
        call: the script's call of `make_private` or `make_private_with_epsilon`.
        reading: list of verdicts, to which this function adds.
        runs: whether the user has stated the number of runs, so that repetitions are separate runs.

    Example:
        >>> source = Source("for _ in range(9): PrivacyEngine().make_private(noise_multiplier=1.0)")
        >>> opacus_facts(source, source.named("make_private")[0], [])
        {'stated_for': 'part'}
    """
    words = source.arguments(call)
    facts: dict[str, Any] = {}
    loader = words.get("data_loader")
    raw = None if loader is None else source.before(loader)
    if isinstance(raw, ast.Call) and call_name(raw) == "DataLoader":
        shown = source.words(raw, ("dataset", "batch_size"))
        facts |= {key: shown[key] for key in ("batch_size", "drop_last") if key in shown}
    for other in source.named("get_epsilon"):
        delta = source.words(other, ("delta",)).get("delta")
        if delta is not None and "target_delta" not in words:
            facts["delta"] = delta
    epochs = _epochs(source)
    if epochs is not None:
        facts["epochs"] = epochs
        counted = source.value(words["epochs"]) if "epochs" in words else UNREAD
        if counted is not UNREAD:
            facts["accounted"] = {"epochs": counted}
    repetition = source.repetition(call)
    if repetition and not runs:
        why = (
            f"Line {call.lineno}: {repetition} makes a new accountant each time. If each time is "
            "a separate run, state `runs`."
        )
        reading.append(Verdict("conditional", why))
        facts["stated_for"] = "part"
    for line in _edits(source):
        reading.append(Verdict("conditional", f"Line {line}: the accountant is changed."))
        facts["stated_for"] = "part"
    if source.named(*_SCHEDULES) or any(
        isinstance(target, ast.Attribute) and target.attr == "noise_multiplier"
        for target in _targets(source)
    ):
        why = "The noise multiplier changes during the run: state the smallest one."
        reading.append(Verdict("conditional", why))
        facts["noise_multiplier"] = None
    if source.named(*_NORMS) and not source.named(*_FIXES):
        facts["clipping"] = "mixed"
    elif _is_rescaled(source, words.get("loss_reduction")):
        facts["clipping"] = "rescaled"
    _check_seeds(source, words.get("noise_generator"), reading, facts)
    _check_objects(source, call, reading, facts)
    if isinstance(raw, ast.Call) and {"sampler", "batch_sampler"} & set(source.arguments(raw)):
        replaced = source.words(call).get("poisson_sampling", True) is True
        if "sampler" in facts or not replaced:  # Opacus has not put in a Poisson sampler
            why = f"Line {raw.lineno}: the loader has a sampler of its own, which was not read."
            reading.append(Verdict("conditional", why, bound=False))
    return facts


def attached_facts(source: Source, call: ast.Call) -> dict[str, Any]:
    """Return the settings of an engine of Opacus before 1.0, or of an optimizer that the script
    wraps itself. In both cases Opacus does not replace the loader.
    """
    words = source.words(call)
    facts = {key: words[name] for name, key in _ATTACHED.items() if name in words}
    facts["accounted"] = {"sampling_rate": words["sample_rate"]} if "sample_rate" in words else None
    facts["sampler"] = "shuffle" if source.named("DataLoader") else None
    if source.named("UniformWithReplacementSampler") or "DPDataLoader" in ast.unparse(source.tree):
        facts["sampler"] = "poisson"
    if call_name(call) == "PrivacyEngine" and not source.named("attach"):
        facts["mechanism"] = "none"
    return facts


def _epochs(source: Source) -> int | None:
    """Return the number of epochs if the script has exactly one loop over epochs and its length can
    be read; otherwise None.
    """
    lengths = []
    for loop in source.nodes(ast.For):
        if "epoch" not in ast.unparse(loop.target).lower():
            continue
        spans = [
            [source.value(part) for part in span.args]
            for span in ast.walk(loop.iter)
            if isinstance(span, ast.Call) and call_name(span) in ("range", "trange")
        ]
        for span in spans:
            numbers = all(isinstance(number, int) for number in span) and len(span) in (1, 2)
            lengths.append(len(range(*span)) if numbers else None)
    return lengths[0] if len(lengths) == 1 else None


def _targets(source: Source) -> Iterator[ast.expr]:
    """Yield everything to which the script assigns a value."""
    for node in source.nodes(ast.Assign, ast.AugAssign, ast.AnnAssign):
        yield from node.targets if isinstance(node, ast.Assign) else [node.target]


def _edits(source: Source) -> Iterator[int]:
    """Yield the numbers of the lines that replace an engine's accountant or change the accountant's
    history.
    """
    for target in _targets(source):
        text = ast.unparse(target)
        if text.endswith(("accountant.history", "engine.accountant")):
            yield target.lineno
    for call in source.named("clear", "pop", "remove"):
        if ast.unparse(call.func).rpartition(".")[0].endswith("accountant.history"):
            yield call.lineno


def _is_rescaled(source: Source, reduction: ast.expr | None) -> bool:
    """Whether the loss is a sum where Opacus expects a mean, or a mean where it expects a sum."""
    expected = "mean" if reduction is None else source.value(reduction)
    if expected not in ("mean", "sum"):
        return False
    for backward in source.named("backward"):
        loss = receiver(backward)
        values = [] if loss is None else [loss, *source.assigned(loss)]
        for value in values:
            if not isinstance(value, ast.Call):
                continue
            for maker in (value, *source.assigned(value.func)):
                words = source.words(maker) if isinstance(maker, ast.Call) else {}
                if words.get("reduction", expected) not in (expected, "none"):
                    return True
    return False


def _check_seeds(
    source: Source, generator: ast.expr | None, reading: list[Verdict], facts: dict[str, Any]
) -> None:
    """Check whether the seeds in the script allow the noise to be drawn again. In secure mode the
    noise comes from the operating system, so seeds do not matter.
    """
    modes = [
        source.value(word.value)
        for engine in source.named("PrivacyEngine")
        for word in engine.keywords
        if word.arg in ("secure_mode", "secure_rng")
    ]
    if True in modes:
        return
    if generator is not None:
        why = "The noise comes from a generator of the script, whose seed must be secret."
        reading.append(Verdict("conditional", why))
    for call in source.named(*_SEEDS):
        owner = ast.unparse(call.func).rpartition(".")[0]
        concerns = owner in _SEEDED
        if generator is not None:
            maker = ast.unparse(source.expression(generator))
            concerns = owner == ast.unparse(generator) or ast.unparse(call) in maker
        if not concerns:
            continue
        constant = all(source.value(argument) is not UNREAD for argument in call.args)
        if constant and UNREAD not in modes:
            facts["noise_seed"] = "public"
        else:
            why = f"Line {call.lineno}: the seed of the noise must be secret."
            reading.append(Verdict("conditional", why))


def _check_objects(
    source: Source, call: ast.Call, reading: list[Verdict], facts: dict[str, Any]
) -> None:
    """Check that training uses the optimizer and the loader that Opacus returns."""
    words = source.arguments(call)
    returned: list[ast.expr] = []
    for node in source.nodes(ast.Assign):
        if node.value is call and isinstance(node.targets[0], ast.Tuple):
            returned = node.targets[0].elts
    private = {place for node in returned for place in source.sources(node)}

    def is_raw(node: ast.expr | None, name: str) -> bool:
        if node is None or name not in words:
            return False
        return bool((source.sources(node) & source.sources(words[name])) - private)

    for step in source.named("step") if returned else []:
        optimizer = receiver(step)
        if optimizer is None or source.sources(optimizer) & private:
            continue
        why = f"Line {step.lineno}: {ast.unparse(optimizer)} is not Opacus's, and adds no noise."
        inside = ast.unparse(source.expression(optimizer)).endswith(".original_optimizer")
        if inside or is_raw(optimizer, "optimizer"):
            reading.append(Verdict("broken", why, bound=False))
        elif call_name(source.expression(optimizer)) in _OPTIMIZERS:
            # an optimizer with a separate loss, such as a generator's, may not depend on the data
            loops = [node for node in source.around(step) if isinstance(node, ast.For)][:1]
            losses = [
                node for node in source.named("backward") if {*source.around(node)} & {*loops}
            ]
            status: Status = "broken" if len(losses) == 1 else "conditional"
            reading.append(Verdict(status, why, bound=False))
    for loop in source.nodes(ast.For):
        inner = {call_name(node) for node in ast.walk(loop) if isinstance(node, ast.Call)}
        names = [node for node in ast.walk(loop.iter) if isinstance(node, ast.Name | ast.Attribute)]
        if {"backward", "step"} & inner and any(is_raw(node, "data_loader") for node in names):
            _use_raw_loader(loop.lineno, reading, facts)
    for manager in source.named("BatchMemoryManager"):
        if is_raw(source.arguments(manager).get("data_loader"), "data_loader"):
            _use_raw_loader(manager.lineno, reading, facts)


def _use_raw_loader(line: int, reading: list[Verdict], facts: dict[str, Any]) -> None:
    why = (
        f"Line {line}: the loop draws from the original loader, not from the one that was returned."
    )
    reading.append(Verdict("conditional", why))
    facts["sampler"] = "shuffle"
