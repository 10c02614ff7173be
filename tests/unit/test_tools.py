"""The tools of the tests: one that is missing is said by name, and no guess is returned."""

from __future__ import annotations

import pytest

from tests import tools


def test_tool_outside_the_table_is_an_error() -> None:
    with pytest.raises(tools.MissingToolError, match=r"^nothing is not in tests/tools: add it"):
        tools.find("nothing")


def test_tool_that_is_not_installed_has_no_path() -> None:
    assert tools.Tool("no-such-program", "apt", "no-such-package").path is None
    assert tools.Tool("promtool", "deb", "no-such-package", "usr/bin/promtool").path is None


def test_every_name_stands_once() -> None:
    names = [tool.name for tool in tools.TOOLS]
    assert len(names) == len(set(names))
