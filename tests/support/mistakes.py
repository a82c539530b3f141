"""The check of a mistake, which must end in one sentence and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedlgm.errors import FedlgmError


def ends_in_one_sentence(make: Callable[[], Any], words: str) -> None:
    """Make the mistake in the current folder, which must be empty."""
    with pytest.raises(FedlgmError) as caught:
        make()
    said = str(caught.value)
    assert words in said
    assert "\n" not in said
    assert len(said) < 600
    assert list(Path().iterdir()) == []
