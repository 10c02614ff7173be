"""Renders the rule files: each template with the values of one file, by plain replacement."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

FOLDER = Path(__file__).resolve().parent
TEMPLATES = FOLDER / "templates"
VALUES = FOLDER / "values.yaml"
_PLACE = re.compile(r"@([A-Za-z][A-Za-z0-9]*)@")
_HEADER = "# Made by alerts/build.py from alerts/templates/ and alerts/values.yaml.\n"


class ValuesError(ValueError):
    """Values and templates do not go together; the text names what."""


def load_values(path: Path = VALUES) -> dict[str, str]:
    """The values of a YAML file, each as the text that replaces its name; raises `ValuesError`."""
    content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if not isinstance(content, dict):
        raise ValuesError(f"{path}: expected a mapping")
    for name, value in content.items():
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValuesError(f"{path}: {name} is neither text nor number")
    return {str(name): str(value) for name, value in content.items()}


def placeholders(text: str) -> set[str]:
    """The names that a template wants replaced."""
    return set(_PLACE.findall(text))


def render(text: str, values: Mapping[str, str]) -> str:
    """The template with every ``@name@`` replaced; raises `ValuesError` for one without value."""
    missing = placeholders(text) - values.keys()
    if missing:
        raise ValuesError(f"no value for {', '.join(sorted(missing))}")
    return _PLACE.sub(lambda match: values[match[1]], text)


def rule_files(values: Mapping[str, str]) -> dict[str, str]:
    """The rendered rule files by name."""
    return {
        path.name: _HEADER + render(path.read_text(encoding="utf-8"), values)
        for path in sorted(TEMPLATES.glob("*.rules.yml"))
    }


def main() -> int:
    """Write the rule files, with a site's own values over the defaults where a file is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--values", type=Path, help="a YAML file with values that differ")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder to write to")
    arguments = parser.parse_args()
    try:
        values = load_values()
        own = load_values(arguments.values) if arguments.values else {}
        if unknown := own.keys() - values.keys():
            raise ValuesError(f"no such value: {', '.join(sorted(unknown))}")
        files = rule_files(values | own)
    except (OSError, ValuesError, yaml.YAMLError) as error:
        print(error, file=sys.stderr)
        return 1
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (arguments.output / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
