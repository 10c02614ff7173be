"""`make demo-stack`: the demo, a Prometheus and an Alertmanager for a person; Ctrl-C stops them."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.stack.stack import Stack
from tests.tools import MissingToolError

# Only what a person would wait for too long: the rest is as it is delivered.
VALUES = {
    "idleFor": "2m",
    "idleOver": "1m",
    "cardDownFor": "20s",
    "usageWithoutAllocationFor": "1m",
}

GUIDE = """\
{demo}
Prometheus    http://127.0.0.1:{prometheus}/graph    http://127.0.0.1:{prometheus}/alerts
Alertmanager  http://127.0.0.1:{alertmanager}/

The dashboards of dashboards/ can be imported into a Grafana with this Prometheus as data source.
In about three minutes the idle reservation on card 3 alerts; let a card be lost or an XID come
to see others.  Ctrl-C stops everything.
"""


def main() -> int:
    """Run until interrupted."""
    # Also where a shell started this in the background, in which Ctrl-C's signal is ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="qgpu-stack-") as folder:
            return _serve(Path(folder))
    except MissingToolError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped")
        return 0


def _serve(folder: Path) -> int:
    with Stack(folder, values=VALUES, seconds=5) as stack:
        demo = stack.log("demo").partition("The far ends")[0]
        print(
            GUIDE.format(
                demo=demo, prometheus=stack.prometheus_port, alertmanager=stack.alertmanager_port
            ),
            flush=True,
        )
        while not stack.ended():
            time.sleep(1)
        for name in stack.ended():
            print(f"{name} has ended:\n{stack.log(name)[-2000:]}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
