"""Asks the stack's HTTP servers on the loopback, in JSON."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlencode


def ask(
    port: int, path: str, parameters: dict[str, str] | None = None, body: object = None
) -> tuple[int, Any]:
    """Status and decoded answer (text where it is no JSON); (0, None) where nobody listens.

    GET, or POST of a JSON `body`.  A form is sent by POST too: parameters may be long.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        if body is not None:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
        elif parameters is not None:
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
            connection.request("POST", path, urlencode(parameters), headers)
        else:
            connection.request("GET", path)
        answer = connection.getresponse()
        raw = answer.read().decode()
    except (OSError, http.client.HTTPException):
        return 0, None
    finally:
        connection.close()
    try:
        return answer.status, json.loads(raw)
    except json.JSONDecodeError:
        return answer.status, raw
