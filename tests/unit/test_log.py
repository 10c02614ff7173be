"""Log lines: one line each, whatever stands in them."""

from __future__ import annotations

import json
import logging

from qgpu_exporter.log import Formatter


def record(message: str, *arguments: object) -> logging.LogRecord:
    made = logging.LogRecord(
        "qgpu_exporter.sources.x", logging.WARNING, "x.py", 7, message, arguments, None
    )
    made.created = 1_700_000_000.25
    return made


def test_logfmt() -> None:
    line = Formatter("logfmt").format(record("source %s failed", "nvml"))
    assert line == (
        'ts=2023-11-14T22:13:20.250Z level=warning caller=sources.x:7 msg="source nvml failed"'
    )


def test_json() -> None:
    line = Formatter("json").format(record("plain"))
    assert json.loads(line) == {
        "ts": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "caller": "sources.x:7",
        "msg": "plain",
    }


def test_a_hostile_text_stays_in_its_value() -> None:
    text = 'x"\nlevel=error msg=forged \x1b[31m\u2028é'
    line = Formatter("logfmt").format(record("%s", text))
    assert line.count("\n") == 0
    assert line.isascii()
    assert "\x1b" not in line
    assert json.loads(line.partition(" msg=")[2]) == text


def test_a_long_text_is_cut() -> None:
    line = Formatter("json").format(record("%s", "x" * 5000))
    assert json.loads(line)["msg"] == "x" * 2000 + "… (5000 characters)"


def test_an_exception_is_part_of_the_line() -> None:
    made = record("failed")
    try:
        raise ValueError("no")
    except ValueError as error:
        made.exc_info = (ValueError, error, None)
    line = Formatter("logfmt").format(made)
    assert line.count("\n") == 0
    assert 'exception="Traceback' in line
    assert line.endswith('ValueError: no\\n"')
