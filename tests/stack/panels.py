"""The dashboards' expressions, with Grafana's variables filled in as Grafana would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.stack.stack import NODE, ROOT

SUBSTITUTES = {
    "$__rate_interval": "10s",
    "$__range": "1m",
    "$__interval": "5s",
    "$cluster": ".*",
    "$namespace": ".*",
    "$pod": ".*",
}
ONE_CARD = {"$node": NODE, "$gpu": "0"}
ALL_CARDS = {"$node": ".*", "$gpu": ".*"}


def targets() -> Iterator[tuple[str, dict[str, Any], dict[str, Any], str]]:
    """(name, panel, target, dashboard) of each expression of each panel."""
    for path in sorted((ROOT / "dashboards").glob("*.json")):
        dashboard = json.loads(path.read_text(encoding="utf-8"))
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                name = f"{path.stem}: {panel['title']} {target['refId']}"
                yield name, panel, target, path.stem


def fill(expression: str, uid: str = "") -> str:
    """The expression for everything, or for one card on the dashboard of one."""
    for name, value in (SUBSTITUTES | (ONE_CARD if uid == "qgpu-shares" else ALL_CARDS)).items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression
