"""Settings that can be read in a Python script without running it."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from fedlgm.check.readers.flower import flower
from fedlgm.check.readers.opacus import opacus_arguments
from fedlgm.check.readers.tensorflow_privacy import tensorflow_privacy
from fedlgm.check.report import Report
from fedlgm.check.verdict import Verdict
from fedlgm.errors import ConfigError

_SERVER = ("strategy", "noise_multiplier", "clipping_norm", "num_sampled_clients")
_ADAPTIVE = (
    *("strategy", "noise_multiplier", "num_sampled_clients", "initial_clipping_norm"),
    *("target_clipped_quantile", "clip_norm_lr", "clipped_count_stddev"),
)
_CALLS: dict[str, tuple[str, ...]] = {
    "make_private": (),
    "make_private_with_epsilon": (),
    "LocalDpMod": ("clipping_norm", "sensitivity", "epsilon", "delta"),
    **{f"DifferentialPrivacy{side}SideFixedClipping": _SERVER for side in ("Server", "Client")},
    **{
        f"DifferentialPrivacy{side}SideAdaptiveClipping": _ADAPTIVE for side in ("Server", "Client")
    },
    "compute_dp_sgd_privacy": ("n", "batch_size", "noise_multiplier", "epochs", "delta"),
    "compute_dp_sgd_privacy_statement": (
        *("number_of_examples", "batch_size", "num_epochs", "noise_multiplier", "delta"),
        *("used_microbatching", "max_examples_per_user"),
    ),
}
"""Calls that are read, with the names of their arguments by position."""
_IGNORED = {
    *("module", "optimizer", "criterion", "data_loader", "strategy", "accountant"),
    *("batch_first", "loss_reduction", "noise_generator", "grad_sample_mode", "wrap_model"),
    *("rand_on_empty", "target_unclipped_quantile", "clipbound_learning_rate"),
    *("max_clipbound", "min_clipbound"),
}
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.USub: operator.neg,
}
_UNREAD = object()


def read_script(text: str, **settings: Any) -> Report:
    """Check a training script by the arguments of its calls; the script is not run.

    Calls of Opacus (`make_private`, `make_private_with_epsilon`), Flower (strategies for
    differential privacy, `LocalDpMod`) and TensorFlow Privacy (`compute_dp_sgd_privacy`) are read,
    with numbers, texts, arithmetic, and names that the script assigns once.

    Args:
        text: source of the script.
        settings: further settings, for what the script does not show.

    Raises:
        ConfigError: the text is not Python, or has no such call or several of them.

    Example:
        >>> script = "engine.make_private(noise_multiplier=1.0, max_grad_norm=args.clip)"
        >>> report = read_script(script, batch_size=100, population=10_000, epochs=5, delta=1e-5)
        >>> [verdict.why for verdict in report.verdicts if verdict.rule == "reading"][1]
        'Line 1: max_grad_norm = args.clip could not be read.'
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"the script is not Python: {error}") from error
    names = _constants(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    known = [call for call in calls if _name(call.func) in _CALLS]
    if len(known) != 1:
        lines = ", ".join(str(call.lineno) for call in known)
        raise ConfigError(
            f"the script must have exactly one call of {', '.join(_CALLS)}; got "
            + (f"those of lines {lines}: check them one by one, as flags" if known else "none")
        )
    (call,) = known
    name = _name(call.func)
    reading = [
        Verdict(
            "conditional",
            f"The script was not run: only line {call.lineno} ({name}) and what it refers to were "
            "read.",
        )
    ]
    values = _arguments(call, names, reading)
    further = {**_further(name, call, calls, names), **settings}
    return _check(name, values, reading, further)


def _check(
    name: str, values: dict[str, Any], reading: list[Verdict], settings: dict[str, Any]
) -> Report:
    if name.startswith("make_private"):
        return opacus_arguments(values, *reading, **settings)
    if name.startswith("compute"):
        shared = {key: value for key, value in values.items() if key not in settings}
        return tensorflow_privacy(*reading, **shared, **settings)
    if "LocalDpMod" in name and len(values) < len(_CALLS[name]):
        raise ConfigError("the script's LocalDpMod has arguments that cannot be read: use flags")
    values = {**dict.fromkeys(_CALLS[name][1:]), **values}
    return flower(name, values, *reading, **settings)


def _arguments(
    call: ast.Call, names: dict[str, ast.expr], reading: list[Verdict]
) -> dict[str, Any]:
    """Arguments of a call that can be read; the others are reported."""
    pairs: list[tuple[str, ast.expr]] = list(zip(_CALLS[_name(call.func)], call.args, strict=False))
    values: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            why = f"Line {call.lineno}: the arguments **{ast.unparse(keyword.value)} are not read."
            reading.append(Verdict("conditional", why))
        else:
            pairs.append((keyword.arg, keyword.value))
    for name, node in pairs:
        if name == "noise_generator":
            why = "The noise comes from a generator of the script, whose seed must be secret."
            reading.append(Verdict("conditional", why))
        if name in _IGNORED:
            continue
        value = _value(node, names)
        if value is _UNREAD:
            shown = f"{name} = {ast.unparse(node)}"
            why = f"Line {node.lineno}: {shown} could not be read."
            reading.append(Verdict("conditional", why))
            if name in ("poisson_sampling", "clipping"):  # which have defaults
                values[name] = None
        else:
            values[name] = value
    return values


def _further(
    name: str, call: ast.Call, calls: list[ast.Call], names: dict[str, ast.expr]
) -> dict[str, Any]:
    """Settings of other calls: the loader, delta, the number of rounds, the pipeline's order."""
    further: dict[str, Any] = {}
    if name.startswith("make_private"):
        loader = next((word.value for word in call.keywords if word.arg == "data_loader"), None)
        made = names.get(loader.id) if isinstance(loader, ast.Name) else loader
        if isinstance(made, ast.Call) and _name(made.func) == "DataLoader":
            further |= _read_words(made, names, {"batch_size", "drop_last"})
        for other in calls:
            if _name(other.func) == "get_epsilon":
                further |= _read_words(other, names, {"delta"})
    elif name.startswith("compute"):
        if any(_name(other.func) == "shuffle" for other in calls):
            further["sampler"] = "shuffle"
        for other in calls:
            if _name(other.func).startswith("DP") and "Optimizer" in _name(other.func):
                further |= _read_words(other, names, {"l2_norm_clip", "num_microbatches"})
    else:
        if any(word.arg == "accountant" for word in call.keywords):
            further |= {"weights": "uniform", "denominator": "expected"}
        for other in calls:
            rounds = _read_words(other, names, {"num_rounds"})
            further |= {"steps": rounds["num_rounds"]} if rounds else {}
    return further


def _read_words(call: ast.Call, names: dict[str, ast.expr], wanted: set[str]) -> dict[str, Any]:
    values = {word.arg: _value(word.value, names) for word in call.keywords if word.arg in wanted}
    return {name: value for name, value in values.items() if value is not _UNREAD and name}


def _constants(tree: ast.AST) -> dict[str, ast.expr]:
    """Expressions of the names that the script assigns exactly once."""
    count: Counter[str] = Counter()
    names: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id: node.value for target in targets if isinstance(target, ast.Name)}
        count.update(_bound(node))
    return {name: value for name, value in names.items() if count[name] == 1 and not count["*"]}


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that a node binds."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.alias):
        yield (node.asname or node.name).partition(".")[0]
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        yield node.name or ""
    elif isinstance(node, ast.MatchMapping):
        yield node.rest or ""
    elif isinstance(node, ast.Global | ast.Nonlocal):
        yield from node.names


def _value(node: ast.expr, names: dict[str, ast.expr], depth: int = 0) -> Any:
    """Value of an expression of constants; `_UNREAD` of any other."""
    if depth > 20:
        return _UNREAD
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return _value(names[node.id], names, depth + 1)
    if isinstance(node, ast.List | ast.Tuple):
        parts = [_value(part, names, depth + 1) for part in node.elts]
        return _UNREAD if _UNREAD in parts else parts
    operands = (
        [node.left, node.right]
        if isinstance(node, ast.BinOp)
        else [node.operand]
        if isinstance(node, ast.UnaryOp)
        else []
    )
    kind: Any = type(getattr(node, "op", node))
    function = _OPERATORS.get(kind)
    numbers = [_value(part, names, depth + 1) for part in operands]
    if function is None or not all(isinstance(number, int | float) for number in numbers):
        return _UNREAD
    try:
        return function(*numbers)
    except (ZeroDivisionError, OverflowError):
        return _UNREAD


def _name(node: ast.expr) -> str:
    """Last name of a called function."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
