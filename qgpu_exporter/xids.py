"""Reads which class of action each XID code has, from the package's table or a user's own."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

PAGE_CLASSES = frozenset(
    {
        "reset_gpu",
        "reboot",
        "workflow_xid_48",
        "workflow_nvlink_err",
        "workflow_nvlink5_err",
        "contact_support",
    }
)
"""The classes whose XIDs the alerting rules treat as critical."""
WARN_CLASSES = frozenset({"restart_app_contained"})
"""The classes whose XIDs they treat as a warning."""

TABLE = "xid_classes.yaml"
MAX_BYTES = 1 << 20
MAX_CODE = 0xFFFF
_CLASS = re.compile(r"[a-z][a-z0-9_]*")
_CODE = re.compile(r"[1-9][0-9]{0,5}")


class ClassesError(ValueError):
    """A table that cannot be used; the text names the file and the line."""


def load(path: str | None = None) -> Mapping[int, str]:
    """Class by XID code, from the file at `path`, or from the package's own table.

    Raises `ClassesError` for a file that cannot be read or is no such table.
    """
    if not path:
        table = importlib.resources.files("qgpu_exporter").joinpath(TABLE)
        return parse(table.read_text(encoding="utf-8"), TABLE)
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ClassesError(f"{path}: longer than {MAX_BYTES} bytes")
        return parse(raw.decode(), path)
    except OSError as error:
        raise ClassesError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ClassesError(f"{path}: not UTF-8") from error


def alerting(classes: Mapping[int, str]) -> frozenset[int]:
    """The codes that alerts name: their counters are born at 0."""
    wanted = PAGE_CLASSES | WARN_CLASSES
    return frozenset(code for code, name in classes.items() if name in wanted)


def parse(text: str, origin: str) -> Mapping[int, str]:
    """Class by XID code, of a YAML mapping from a class to a list of codes.

    `origin` is the name that errors give; raises `ClassesError`.
    """
    try:
        # Nodes, not objects: they know their lines, and an alias in them costs nothing.
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ClassesError(f"{origin}:{_line(mark)}: {error.problem}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ClassesError(f"{origin}: not YAML") from error
    classes: dict[int, str] = {}
    for name, code, node in _entries(root, origin):
        if code in classes:
            raise _error(origin, node, f"XID {code} has a class already: {classes[code]}")
        classes[code] = name
    return dict(sorted(classes.items()))


def _entries(root: yaml.Node | None, origin: str) -> Iterator[tuple[str, int, yaml.Node]]:
    """(class, code, the code's node) in the file's order."""
    if not isinstance(root, yaml.MappingNode):
        raise ClassesError(f"{origin}:1: expected a mapping of classes to lists of XIDs")
    for key, codes in root.value:
        if not isinstance(key, yaml.ScalarNode) or not _CLASS.fullmatch(key.value):
            raise _error(origin, key, "a class is a word in lower case, like reset_gpu")
        if not isinstance(codes, yaml.SequenceNode):
            raise _error(origin, codes, f"{key.value}: expected a list of XIDs")
        for node in codes.value:
            if not isinstance(node, yaml.ScalarNode) or not _CODE.fullmatch(node.value):
                raise _error(origin, node, f"{key.value}: an XID is a number from 1 to {MAX_CODE}")
            code = int(node.value)
            if code > MAX_CODE:
                raise _error(origin, node, f"{key.value}: an XID is a number from 1 to {MAX_CODE}")
            yield key.value, code, node


def _error(origin: str, node: yaml.Node, text: str) -> ClassesError:
    return ClassesError(f"{origin}:{_line(node.start_mark)}: {text}")


def _line(mark: yaml.Mark | None) -> int:
    return mark.line + 1 if mark is not None else 1
