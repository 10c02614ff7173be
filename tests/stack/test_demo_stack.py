"""`make demo-stack`: it says where everything is, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.stack.ask import ask
from tests.stack.processes import Running, wait_for

pytestmark = pytest.mark.xdist_group("prometheus")


def test_ctrl_c_stops_everything(tmp_path: Path) -> None:
    with Running([sys.executable, "-m", "tests.stack"], tmp_path / "log") as stack:

        def addresses() -> list[int]:
            text = stack.log.read_text(encoding="utf-8")
            ports = re.findall(r"http://127\.0\.0\.1:(\d+)/(?:metrics|graph|\n| tells)", text)
            return [int(port) for port in ports] if "Ctrl-C" in text else []

        ports = wait_for(addresses)
        assert len(ports) == 4
        assert all(ask(port, "/")[0] in {200, 302} for port in ports)
        assert stack.interrupt() == 0
    assert stack.log.read_text(encoding="utf-8").endswith("stopped\n")
    assert [ask(port, "/")[0] for port in ports] == [0, 0, 0, 0]
