"""A webhook receiver for Alertmanager: keeps what it is told."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class Receiver:
    """Listens on a free port; `alerts` are all that came, each with its status and receiver."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                for alert in message["alerts"]:
                    receiver.alerts.append({**alert, "receiver": message["receiver"]})
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def find(self, status: str, **labels: str) -> dict[str, Any] | None:
        """The newest alert of the status that has these labels."""
        found: list[dict[str, Any]] = [
            alert
            for alert in self.alerts
            if alert["status"] == status and labels.items() <= alert["labels"].items()
        ]
        return found[-1] if found else None
