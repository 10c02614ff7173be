"""Fixtures that every kind of test may use."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

from tests import tools

# No verdict is a timing, so no deadline and no complaint of a slow machine.  Where CI is set the
# examples are always the same ones, so that a change is judged by what it changed.
settings.register_profile(
    "project",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("project")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden pages anew; reading the diff is the review",
    )


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether the golden pages are to be written anew."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session")
def tool() -> Callable[[str], str]:
    """`tool("promtool")` is the program's absolute path; a missing one fails the test."""

    def path(name: str) -> str:
        try:
            return str(tools.find(name))
        except tools.MissingToolError as error:
            pytest.fail(str(error), pytrace=False)

    return path
