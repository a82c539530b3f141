"""Reading of a Python script by its syntax tree: constants, calls, and what names stand for."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from fedlgm.errors import ConfigError

UNREAD = object()
"""Value of an expression that is not constant."""
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.USub: operator.neg,
}
_MEMBERS = ("SamplingMethod", "NeighboringRelation")
_HANDLERS = {"fit", "train"}
_LOOPS = (ast.For, ast.While, ast.AsyncFor, ast.ListComp, ast.GeneratorExp, ast.DictComp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Source:
    """A Python script, which is parsed but not run.

    Attributes:
        calls: all calls, in the order of their lines.

    Raises:
        ConfigError: the text is not Python.

    Example:
        >>> source = Source("SIZE = 2 * 32; loader = DataLoader(data, batch_size=SIZE)")
        >>> (call,) = source.calls
        >>> call_name(call), source.words(call)
        ('DataLoader', {'batch_size': 64})
    """

    def __init__(self, text: str) -> None:
        try:
            self.tree = ast.parse(text)
            self._parents = {
                child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
            }
            self._names = _constants(self.tree)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(f"the script is not Python: {error}") from error
        calls = self.nodes(ast.Call)
        self.calls = sorted(calls, key=lambda call: (call.lineno, call.col_offset))

    def nodes(self, *kinds: Any) -> list[Any]:
        """Return all nodes of the syntax tree of the given kinds."""
        return [node for node in ast.walk(self.tree) if isinstance(node, kinds)]

    def named(self, *names: str) -> list[ast.Call]:
        """Return the calls of functions with these names, such as "step" for `optimizer.step()`."""
        return [call for call in self.calls if call_name(call) in names]

    def expression(self, node: ast.expr) -> ast.expr:
        """Return the expression that the script assigns to a name, if the script assigns the name
        only once. Any other expression is returned unchanged.
        """
        return self._names.get(node.id, node) if isinstance(node, ast.Name) else node

    def before(self, node: ast.expr) -> ast.expr | None:
        """Return the expression that a name stands for where it is used, if exactly one assignment
        to the name is above it. A call is returned unchanged.
        """
        if isinstance(node, ast.Call):
            return node
        values = self.assigned(node)
        above = [value for value in values if value.lineno < node.lineno]
        return above[0] if len(above) == 1 else None

    def assigned(self, node: ast.expr) -> list[ast.expr]:
        """Return all expressions that the script assigns to a name or attribute."""
        places = self.sources(node)
        return [
            assignment.value
            for assignment in self.nodes(ast.Assign)
            for target in assignment.targets
            if not isinstance(target, ast.Tuple) and self.sources(target) & places
        ]

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """Compute the value of an expression that consists of constants. Return `UNREAD` for any
        other expression.
        """
        if depth > 20:
            return UNREAD
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id in self._names:
            return self.value(self._names[node.id], depth + 1)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith(_MEMBERS):
            return node.attr
        if isinstance(node, ast.List | ast.Tuple):
            parts = [self.value(part, depth + 1) for part in node.elts]
            return UNREAD if UNREAD in parts else parts
        operands = (
            [node.left, node.right]
            if isinstance(node, ast.BinOp)
            else [node.operand]
            if isinstance(node, ast.UnaryOp)
            else []
        )
        kind: Any = type(getattr(node, "op", node))
        function = _OPERATORS.get(kind)
        numbers = [self.value(part, depth + 1) for part in operands]
        if function is None or not all(isinstance(number, int | float) for number in numbers):
            return UNREAD
        try:
            return function(*numbers)
        except (ZeroDivisionError, OverflowError):
            return UNREAD

    def arguments(self, call: ast.Call, names: tuple[str, ...] = ()) -> dict[str, ast.expr]:
        """Return the arguments of a call by name; `names` are the names of the positional
        arguments.
        """
        pairs = dict(zip(names, call.args, strict=False))
        return pairs | {word.arg: word.value for word in call.keywords if word.arg is not None}

    def words(self, call: ast.Call, names: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the arguments of a call that are constants, by name."""
        values = {key: self.value(node) for key, node in self.arguments(call, names).items()}
        return {key: value for key, value in values.items() if value is not UNREAD}

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that contain a node, innermost first."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def repetition(self, node: ast.AST, depth: int = 0) -> str | None:
        """Describe what repeats a node: a loop around it, a training handler of a federated client,
        or a loop around a call of the function that contains it. Return None if nothing repeats the
        node.
        """
        for outer in self.around(node):
            if isinstance(outer, _LOOPS):
                return f"the loop of line {outer.lineno}"
            if isinstance(outer, _FUNCTIONS):
                holder = self._parents[outer]
                bases = getattr(holder, "bases", [])
                client = any("Client" in ast.unparse(base) for base in bases)
                routes = [ast.unparse(item) for item in outer.decorator_list]
                if (client and outer.name in _HANDLERS) or any(".train(" in r for r in routes):
                    return f"{outer.name}(), which every round calls"
                calls = self.named(outer.name) if depth < 5 else []
                reasons = (self.repetition(call, depth + 1) for call in calls)
                return next((reason for reason in reasons if reason), None)
        return None

    def sources(self, node: ast.expr, depth: int = 0) -> set[tuple[ast.AST, str]]:
        """Identify what a name or attribute stands for by pairs (scope, text). A parameter of a
        function stands for the arguments in the script's calls of this function.
        """
        scope = self._scope(node)
        text = ast.unparse(node)
        if not isinstance(node, ast.Name) or not isinstance(scope, _FUNCTIONS) or depth > 5:
            return {(scope, text)}
        names = tuple(item.arg for item in (*scope.args.posonlyargs, *scope.args.args))
        if text not in (*names, *(item.arg for item in scope.args.kwonlyargs)):
            return {(scope, text)}
        places: set[tuple[ast.AST, str]] = set()
        for call in self.named(scope.name):
            argument = self.arguments(call, names).get(text)
            if argument is not None:
                places |= self.sources(argument, depth + 1)
        return places

    def _scope(self, node: ast.expr) -> ast.AST:
        """Return the innermost function around a name that binds it, or else the script's tree.
        Attributes belong to the script.
        """
        if isinstance(node, ast.Name):
            for outer in self.around(node):
                if isinstance(outer, _FUNCTIONS) and any(
                    node.id in _bound(part) for part in ast.walk(outer)
                ):
                    return outer
        return self.tree


def call_name(call: ast.expr) -> str:
    """Return the last part of the name of a called function; "" for any other expression."""
    function = call.func if isinstance(call, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def receiver(call: ast.Call) -> ast.expr | None:
    """Return the object whose method is called; None if the call is not a call of a method."""
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def _constants(tree: ast.AST) -> dict[str, ast.expr]:
    """Return the expression of each name to which the script assigns a value exactly once."""
    count: Counter[str] = Counter()
    names: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id: node.value for target in targets if isinstance(target, ast.Name)}
        count.update(_bound(node))
    return {name: value for name, value in names.items() if count[name] == 1 and not count["*"]}


def _bound(node: ast.AST) -> list[str]:
    """Return the names that a node binds."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
        return [node.id]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.alias):
        return [(node.asname or node.name).partition(".")[0]]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        return [node.name or ""]
    if isinstance(node, ast.MatchMapping):
        return [node.rest or ""]
    return node.names if isinstance(node, ast.Global | ast.Nonlocal) else []
