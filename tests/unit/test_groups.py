"""Tests of one group run one after the other: what starts one server must not meet another."""

from __future__ import annotations

import os

import pytest


@pytest.mark.xdist_group("groups")
def test_groups_reach_the_workers(request: pytest.FixtureRequest) -> None:
    """Some versions of pytest lose what pytest-xdist writes into the ids."""
    beside_others = "PYTEST_XDIST_WORKER" in os.environ
    assert request.node.nodeid.endswith("@groups") == beside_others
