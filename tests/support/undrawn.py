"""Reports without their pictures, which take most of their time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def without_drawing() -> Iterator[None]:
    """Figures are saved empty."""
    from matplotlib.figure import Figure

    def save(figure: Figure, place: Any, **options: Any) -> None:
        if isinstance(place, str | Path):
            Path(place).write_bytes(b"")
        else:
            place.write("<svg></svg>")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", save)
        yield


@pytest.fixture
def undrawn() -> Iterator[None]:
    """Pictures of this test are not drawn: it looks at words and figures."""
    with without_drawing():
        yield
