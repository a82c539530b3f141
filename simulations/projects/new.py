"""New projects from templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from fedlgm.checks import check_positive
from fedlgm.errors import ConfigError, DiskError
from fedlgm.files import draft_folder, explain_failure, is_used, path_of, read_toml
from fedlgm.wording import alternatives

TEMPLATES = Path(__file__).parent / "templates"
_SUFFIX = ".template"
_NOISED = {
    "central": "a trusted server adds the noise",
    "local": "each client adds its own noise",
}


@dataclass(frozen=True)
class Protection:
    """A unit and a trust model that a project can have, with the recipe that provides them.

    Attributes:
        unit: unit of protection.
        trust: trust model.
        recipe: name of a bundled recipe; empty for projects without one.
        settings: further overrides.
    """

    unit: str
    trust: str
    recipe: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """A kind of project: a folder of templates, whose `kind.toml` holds these values.

    Attributes:
        run: the command that runs the project, in its folder.
        protections: what the project can protect; the first is the default.
        why: why other units and trust models are not offered, with the alternative.
    """

    run: str
    protections: tuple[Protection, ...]
    why: str


def names() -> list[str]:
    """The kinds of projects.

    Example:
        >>> "pytorch" in names()
        True
    """
    return sorted(folder.name for folder in TEMPLATES.iterdir())


def kind_of(name: str) -> Kind:
    """The kind of project of this name.

    Raises:
        ConfigError: there is no such kind; the message names similar kinds.

    Example:
        >>> kind_of("opacus").run
        'python train.py'
    """
    if name not in names():
        raise ConfigError(f"unknown kind of project {name!r}; {alternatives(name, names())}")
    values = read_toml(TEMPLATES / name / "kind.toml")
    protections = tuple(Protection(**protection) for protection in values.pop("protections"))
    return Kind(protections=protections, **values)


def protection_of(kind: str, unit: str | None = None, trust: str | None = None) -> Protection:
    """The protection of a kind of project that has this unit and trust model.

    Args:
        kind: name of the kind.
        unit: unit of protection; None takes the unit of the first protection that fits.
        trust: trust model; None takes the trust model of the first protection that fits.

    Raises:
        ConfigError: the kind does not offer them; the message says what it offers.

    Example:
        >>> protection_of("pytorch", unit="example").recipe
        'dp-sgd-digits'
    """
    offered = kind_of(kind).protections
    for protection in offered:
        if unit in (None, protection.unit) and trust in (None, protection.trust):
            return protection
    choices = " or ".join(f"--unit {each.unit} --trust {each.trust}" for each in offered)
    wanted = " ".join(
        f"--{name} {value}" for name, value in (("unit", unit), ("trust", trust)) if value
    )
    raise ConfigError(
        f"a project of kind {kind!r} has no {wanted}: {kind_of(kind).why}; it offers {choices}"
    )


def refuse_used(path: Path) -> None:
    """Refuse a path for a project if it exists and is not an empty folder.

    Raises:
        ConfigError: the path exists and is not an empty folder.

    Example:
        >>> refuse_used(Path("a-folder-that-does-not-exist"))
    """
    if is_used(path):
        raise ConfigError(
            f"{path} already exists and is not an empty folder: name a new folder, so that no file "
            "of yours is overwritten"
        )


def write(kind: str, folder: Path | str, protection: Protection, epsilon: float) -> list[Path]:
    """Write a project into a new folder.

    Args:
        kind: name of the kind.
        folder: folder to create; an empty one may exist.
        protection: one of the kind's protections.
        epsilon: budget of a run.

    Returns:
        The files.

    Raises:
        ConfigError: the folder is not empty, or epsilon is not above 0; nothing is written.
        DiskError: the folder cannot be written.

    Example:
        >>> import tempfile
        >>> place = tempfile.mkdtemp() + "/project"
        >>> [file.name for file in write("opacus", place, protection_of("opacus"), 8.0)]
        ['README.md', 'test_train.py', 'train.py']
    """
    check_positive(epsilon=epsilon)
    path = path_of("DIR", folder)
    refuse_used(path)
    values = {
        "project": path.resolve().name,
        "epsilon": f"{epsilon:g}",
        "noised": _NOISED[protection.trust],
        "unit": protection.unit,
        "recipe": protection.recipe,
        "settings": "".join(
            f', "{key}": {json.dumps(value)}' for key, value in protection.settings.items()
        ),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft_folder(path) as draft:
            draft.mkdir()
            for template in sorted((TEMPLATES / kind).glob(f"*{_SUFFIX}")):
                text = Template(template.read_text(encoding="utf-8")).substitute(values)
                (draft / template.name.removesuffix(_SUFFIX)).write_text(text, encoding="utf-8")
    except OSError as error:
        raise DiskError(
            explain_failure(f"cannot write the project {path}", error, "choose another folder")
        ) from error
    return sorted(path.iterdir())
