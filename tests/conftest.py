"""Fixtures that every kind of test may use."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import tools


@pytest.fixture(scope="session")
def tool() -> Callable[[str], str]:
    """`tool("promtool")` is the program's absolute path; a missing one fails the test."""

    def path(name: str) -> str:
        try:
            return str(tools.find(name))
        except tools.MissingToolError as error:
            pytest.fail(str(error), pytrace=False)

    return path
