"""Certified runs that the tests of all files share; a test that changes a run's files puts them
back."""

from __future__ import annotations

import pytest

from tests.support.certificates import Certified, certified_run


@pytest.fixture(scope="session")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Certified:
    return certified_run(tmp_path_factory.mktemp("honest"))


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Certified:
    return certified_run(tmp_path_factory.mktemp("other"), beacon=False)
