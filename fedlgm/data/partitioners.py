"""Import of `flwr_datasets.partitioner` without the rest of its package, which imports plotting
libraries and thereby takes seconds.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from types import ModuleType
from typing import Any

from fedlgm.errors import ConfigError

_PACKAGE = "flwr_datasets"


class _Unfinished(ModuleType):
    """A package whose code runs only when one of its attributes is first used. Its modules can be
    imported without running this code.
    """

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        if name.startswith("__") or spec is None or spec.loader is None:
            raise AttributeError(name)
        self.__class__ = ModuleType  # type: ignore[assignment]
        spec.loader.exec_module(self)
        return getattr(self, name)


def partitioners() -> Any:
    """Import and return the module `flwr_datasets.partitioner`.

    Raises:
        ConfigError: flwr-datasets is not installed.
    """
    if _PACKAGE not in sys.modules:
        spec = importlib.util.find_spec(_PACKAGE)
        if spec is None:
            raise ConfigError(
                "this partition scheme needs the package flwr-datasets: pip install flwr-datasets"
            )
        package = importlib.util.module_from_spec(spec)
        package.__class__ = _Unfinished
        sys.modules[_PACKAGE] = package
    # in a notebook without ipywidgets, the import warns about progress bars that are never shown
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress not found")
        return importlib.import_module(f"{_PACKAGE}.partitioner")
