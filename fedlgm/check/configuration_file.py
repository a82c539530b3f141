"""Reports on a run that is described by a file: settings in TOML, a configuration of NVFlare in
JSON, or a Python script.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedlgm.check.readers.common import join, report
from fedlgm.check.readers.flower import flower
from fedlgm.check.readers.nvflare import nvflare
from fedlgm.check.readers.opacus import opacus_arguments
from fedlgm.check.readers.tensorflow_privacy import tensorflow_privacy
from fedlgm.check.report import Report
from fedlgm.check.script import read_script
from fedlgm.errors import ConfigError
from fedlgm.files import explain_failure, path_of, read_toml

FORMAT = 1
"""Version of the format of a TOML file."""
_SECTIONS = ("opacus", "flower", "tensorflow-privacy", "nvflare")


def check_file(path: str | Path, **settings: Any) -> Report:
    """Check the run that a file describes.

    Args:
        path: a TOML file, a JSON file with a configuration of NVFlare, or a Python script, which is
            not run. A TOML file contains settings and, below them, at most one section with a
            framework's arguments: [opacus], [flower], [tensorflow-privacy] or [nvflare].
        settings: further settings, which may not contradict the settings in the file.

    Raises:
        ConfigError: the file cannot be read, or contains unknown or repeated keys, or values that
            cannot be used.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "run.toml"
        >>> _ = file.write_text("mechanism = 'percentile'")
        >>> check_file(file).status
        'broken'
    """
    path = path_of("the file", path)
    if path.suffix == ".toml":
        return check_values(read_toml(path), **settings)
    if path.suffix not in (".json", ".py"):
        raise ConfigError(f"{path} must be a .toml, .json or .py file, or a run's folder")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(explain_failure(f"{path} cannot be read", error)) from error
    return read_script(text, **settings) if path.suffix == ".py" else _nvflare(text, **settings)


def check_values(values: dict[str, Any], **settings: Any) -> Report:
    """Check the run that the content of a TOML file describes; see `check_file`.

    Raises:
        ConfigError: the version is unknown, the content has several sections, or a section or its
            values cannot be used.

    Example:
        >>> section = {"class": "PrivacyConfig", "target_delta": 0.1, "population_size": 100,
        ...            "neighboring_relation": "replace-one", "sampling_method": "poisson"}
        >>> check_values({"flower": section}).status
        'broken'
    """
    values = dict(values)
    version = values.pop("version", FORMAT)
    if version != FORMAT or isinstance(version, bool):
        raise ConfigError(f"version {version!r} is not known: this fedlgm reads version {FORMAT}")
    sections = [name for name in _SECTIONS if name in values]
    if not sections:
        return report(values, settings)
    if len(sections) > 1:
        raise ConfigError(f"a file describes one run, but has sections {', '.join(sections)}")
    (name,) = sections
    section = values.pop(name)
    if not isinstance(section, dict):
        raise ConfigError(f"{name} must be a section of keys, such as [{name}]")
    settings = join(values, settings)
    if name == "opacus":
        return opacus_arguments(section, **settings)
    if name == "nvflare":
        return nvflare(section, **settings)
    if name == "tensorflow-privacy":
        return tensorflow_privacy(**join(section, settings))
    if not isinstance(section.get("class"), str):
        raise ConfigError("flower.class must be the name of a class, such as 'LocalDpMod'")
    arguments = {key: value for key, value in section.items() if key != "class"}
    return flower(section["class"], arguments, **settings)


def _nvflare(text: str, **settings: Any) -> Report:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in items]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"the key {key!r} is repeated")
        return dict(items)

    def refuse(number: str) -> Any:
        raise ValueError(f"{number} is not a number of JSON")

    try:
        config = json.loads(text, object_pairs_hook=pairs, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not valid JSON: {error}") from error
    return nvflare(config, **settings)
