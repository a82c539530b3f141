"""Functions that load and call the users' objects that a recipe names as "package.module:name".

Only this module of the library imports objects that a recipe names. An import runs the code of the
imported module, so a recipe must name only modules that you trust.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import lru_cache, partial, reduce
from pathlib import Path
from typing import Any, TypeVar

from fedlgm.errors import ConfigError, FedlgmError, out_of_memory

K = TypeVar("K")

_NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

OWN = "your own as 'package.module:name'"

HUB = "hf:"
"""Prefix of the name of a data set on the Hugging Face Hub. `is_reference` does not treat such a
name as a reference to a user's object.
"""


def is_reference(name: object) -> bool:
    """Whether a recipe's value is the dotted name of a user's object and not a bundled name.

    >>> is_reference("mypkg.models:Net"), is_reference("mlp")
    (True, False)
    """
    return isinstance(name, str) and ":" in name and not name.startswith(HUB)


def object_name(value: object) -> str:
    """Return the name by which a recipe records an object that was passed in Python: the object's
    name or, if it has none, the name of its class, in angle brackets.

    >>> object_name(print), object_name([]), object_name(lambda: 0)
    ('<print>', '<list>', '<lambda>')
    """
    name = getattr(value, "__name__", None) or type(value).__name__
    return f"<{name.strip('<>')}>"


def shown_name(value: object) -> str:
    """Quote a name, or the name of an object that was passed in Python, for a message.

    >>> shown_name("adam"), shown_name(print)
    ("'adam'", "'<print>'")
    """
    return repr(value if isinstance(value, str) else object_name(value))


def is_object(name: object) -> bool:
    """Whether a recipe's value stands for an object that was passed in Python.

    >>> is_object("<Net>"), is_object("mlp")
    (True, False)
    """
    return isinstance(name, str) and name.startswith("<") and name.endswith(">")


def object_or_name(own: Any, name: Any, what: str) -> Any:
    """Return the object that was passed in Python or, if no object was passed, the name in the
    recipe.

    Args:
        own: the object; None if no object was passed.
        name: the name in the recipe.
        what: name of the argument that takes the object.

    Raises:
        ConfigError: no object was passed, but the name in the recipe stands for an object.
    """
    if own is None and is_object(name):
        raise ConfigError(
            f"{what} {name!r} was passed as a Python object, which a recipe cannot hold: pass it "
            f"again, as in simulations.resume(run, {what}=...)"
        )
    return name if own is None else own


def load_object(reference: str, what: str) -> Any:
    """Import the object that `reference` names.

    The module is searched for where `import` searches, and then in the current directory.

    Args:
        reference: "package.module:name"; the name may have dots ("module:Class.method").
        what: purpose of the object ("model", "task", ...), for the message of an error.

    Returns:
        The object, which is neither called nor checked.

    Raises:
        ConfigError: the reference is malformed, its module cannot be imported, or the module does
            not define the name. The message names the module and the reason.

    >>> load_object("math:sqrt", "function")(9.0)
    3.0
    """
    module_name, _, name = reference.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        raise ConfigError(f"{what} {reference!r}: name your own object as 'package.module:name'")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
        importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything while it is imported
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(
            f"{error.name}."
        ):
            reason = f"there is no module {error.name!r} on Python's path or in {here}"
        elif isinstance(error, ModuleNotFoundError):
            reason = f"it imports {error.name!r}, which is not installed"
        raise ConfigError(
            f"{what} {reference!r}: module {module_name!r} cannot be imported: {reason}"
        ) from error
    try:
        return reduce(getattr, name.split("."), module)
    except AttributeError as error:
        package = module_name.partition(".")[0]
        names = [key for key, value in vars(module).items() if package_of(value) == package]
        similar = get_close_matches(name, names, n=1)
        hint = f"; did you mean {similar[0]!r}?" if similar else ""
        raise ConfigError(
            f"{what} {reference!r}: module {module_name!r} has no {name!r}{hint}"
        ) from error


def is_bundled(found: object) -> bool:
    """Whether an object's class is defined in the package `fedlgm` and not by a user.

    Example:
        >>> from fedlgm.planning.queries import BelowBound
        >>> class Mine(BelowBound):
        ...     __module__ = "mypkg.queries"
        >>> is_bundled(BelowBound((2, 3))), is_bundled(Mine((2, 3)))
        (True, False)
    """
    return package_of(type(found)) == "fedlgm"


def package_of(value: object) -> str:
    """Return the top-level package in which a class or function is defined; empty if the value does
    not record a module.

    Example:
        >>> package_of(package_of), package_of(3)
        ('fedlgm', '')
    """
    return str(getattr(value, "__module__", "")).partition(".")[0]


@contextmanager
def users_code(label: str, found: Any, kind: type[FedlgmError] = ConfigError) -> Iterator[None]:
    """Turn any exception of a user's code in the block into one error with a short message, which
    names the line of the user's file.

    These exceptions pass unchanged:

    * A `FedlgmError`, whose message is already written for the user. A caller that knows the recipe
      adds the name of the recipe's section to the message (`fedlgm.wording.prefix_key`); a label
      would repeat this name.
    * An exception that `fedlgm.errors.out_of_memory` recognises. Such an error does not mean that
      the user's code is wrong: fewer clients at once or a smaller model may fit into memory.
    * KeyboardInterrupt, SystemExit and other exceptions that are not an `Exception`. They stop the
      run.

    A `TypeError` is treated like other exceptions: it cannot mean that the arguments do not fit,
    because callers check this with `misfit` before the call.

    Args:
        label: beginning of the message, for example "model 'mypkg.models:Net'".
        found: the user's object. The message names the innermost line of the object's file in the
            traceback.
        kind: class of the error that is raised.

    Raises:
        FedlgmError: an error of class `kind`, "LABEL: TYPE: TEXT (FILE, line N)".

    Example:
        >>> def loss(outputs, targets):
        ...     return outputs / len(targets)
        >>> with users_code("task 'loss'", loss):
        ...     loss(1.0, [])
        Traceback (most recent call last):
        fedlgm.errors.ConfigError: task 'loss': ZeroDivisionError: float division by zero...
    """
    try:
        yield
    except Exception as error:  # a user's code may raise anything
        if isinstance(error, FedlgmError) or out_of_memory(error):
            raise
        raise kind(f"{label}: {raised_in(found, error)}") from error


def misfit(function: Any, *arguments: Any, **options: Any) -> str:
    """Explain, without a call, why a function or class does not accept these arguments.

    The explanation is empty if the arguments fit, or if Python does not know the parameters.

    >>> misfit(lambda lr, momentum: lr, 0.1), misfit(lambda lr: lr, 0.1)
    ("missing a required argument: 'momentum'", '')
    """
    try:
        signature = _signature(function)
    except (ValueError, TypeError):
        return ""
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        return str(error)
    return ""


def sealed(kind: type[K]) -> type[K]:
    """Decorate a class so that no class can be derived from it, because a derived class could claim
    a privacy cost that does not follow from the fields of the class.

    >>> @sealed
    ... class Facts:
    ...     rate = 1.0
    >>> class Mine(Facts):
    ...     rate = 0.1
    Traceback (most recent call last):
    fedlgm.errors.ConfigError: Mine cannot be derived from Facts: a cost must follow only from the fields of Facts
    """

    def refuse(derived: type) -> None:
        raise ConfigError(
            f"{derived.__name__} cannot be derived from {kind.__name__}: a cost must follow only "
            f"from the fields of {kind.__name__}"
        )

    kind.__init_subclass__ = classmethod(refuse)  # type: ignore[assignment]
    return kind


def call_with_options(
    found: Any, label: str, options: Mapping[str, Any], filled: Mapping[str, Any] | None = None
) -> Any:
    """Call a class or function with a recipe's options, and return the result.

    Args:
        found: the class or function.
        label: beginning of a message, such as "task 'mypkg.tasks:Own'".
        options: the recipe's options.
        filled: values that the library supplies for parameters, by the name of the parameter. These
            parameters are not options.

    Raises:
        ConfigError: an option is unknown, the arguments do not fit, or the class or function raises
            an exception (see `users_code`).

    >>> call_with_options(lambda lr, classes: (lr, classes), "rule 'own'", {"lr": 0.1}, {"classes": 3})
    (0.1, 3)
    >>> call_with_options(lambda lr: lr, "rule 'own'", {"rate": 0.1})
    Traceback (most recent call last):
    fedlgm.errors.ConfigError: rule 'own': unknown option 'rate'; its options: lr
    """
    parameters, filled = parameters_of(found), filled or {}
    option_names = options_of(found, filled)
    unknown = [key for key in options if key not in option_names]
    if unknown and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        raise ConfigError(
            f"{label}: unknown option {unknown[0]!r}; its options: {', '.join(option_names) or 'none'}"
        )
    arguments = {key: value for key, value in filled.items() if key in parameters} | dict(options)
    wrong = misfit(found, **arguments)
    if wrong:
        raise ConfigError(f"{label}: {wrong}; its options: {', '.join(option_names) or 'none'}")
    with users_code(label, found):
        return found(**arguments)


def raised_in(found: Any, error: BaseException) -> str:
    """Describe an exception of a user's code in one line of text, which names the innermost line of
    the user's file in the traceback.

    Args:
        found: the function, class or object that was called.
        error: the exception that the call raised.
    """
    while isinstance(found, partial):
        found = found.func
    try:
        source = inspect.getsourcefile(
            inspect.unwrap(found)
            if inspect.isroutine(found) or isinstance(found, type)
            else type(found)
        )
    except TypeError:
        source = None
    frames = traceback.extract_tb(error.__traceback__)
    place = next((frame for frame in reversed(frames) if frame.filename == source), None)
    where = "" if place is None else f" ({Path(place.filename).name}, line {place.lineno})"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}{where}"


def options_of(found: Any, filled: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the names of the parameters of a function or class that a caller may set by keyword,
    without the parameters in `filled`, which the library sets.
    """
    return tuple(
        key for key, p in parameters_of(found).items() if p.kind in _NAMED and key not in filled
    )


def parameters_of(function: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function or class by name; empty if Python does not know the
    parameters, or if the object cannot be called.
    """
    try:
        return dict(_signature(function).parameters)
    except (ValueError, TypeError):
        return {}


def _signature(function: Any) -> inspect.Signature:
    return (_class_signature if isinstance(function, type) else inspect.signature)(function)


# For a class without an `__init__`, Python parses the text of a signature, which takes half a
# millisecond. The signatures of classes are therefore cached.
_class_signature = lru_cache(maxsize=256)(inspect.signature)


def source_of(reference: str, what: str) -> tuple[Path | None, str | None]:
    """Find the file that defines the object which `reference` names, and the SHA-256 of the file's
    bytes in hexadecimal digits.

    Returns:
        (None, None) if the object has no source file, for example in a compiled module.

    Raises:
        ConfigError: see `load_object`.
    """
    value = load_object(reference, what)
    try:
        file = inspect.getsourcefile(value if callable(value) else type(value))
    except TypeError:
        file = None
    file = file or getattr(sys.modules[reference.partition(":")[0]], "__file__", None)
    if file is None or not Path(file).is_file():
        return None, None
    return Path(file), hashlib.sha256(Path(file).read_bytes()).hexdigest()
