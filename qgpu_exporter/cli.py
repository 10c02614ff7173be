"""The command line: reads command and flags, runs the command, turns its end to an exit code."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from qgpu_exporter import __version__, commands, config, log

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2

COMMANDS: Mapping[str, str] = {
    "serve": "serve the metrics until a signal ends it (the default)",
    "once": "wait for the first snapshot, print one scrape and end; exits 1 if no source answered",
    "check": "say of each source whether it works and how to mend it; exits 1 if one fails",
    "demo": "serve a simulated node: cards, kubelet and API server are made up",
}

EPILOG = """\
Every flag is also an environment variable (--web.max-requests: QGPU_EXPORTER_WEB_MAX_REQUESTS;
lists separated by commas) and a key of the configuration file; a flag is stronger than a variable,
a variable than the file.

Exit codes: 0 ended well; 1 the command failed, or --devices.exit-after came due; 2 a setting is
wrong.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, exit 2."""
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def parser() -> argparse.ArgumentParser:
    """The argument parser; flags grouped by topic in the order of `config.Settings`."""
    made = _Parser(
        prog="qgpu-exporter",
        description="Prometheus exporter of who holds and uses which part of which GPU of a node.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = "; ".join(f"{name}: {text}" for name, text in COMMANDS.items())
    made.add_argument("command", nargs="?", choices=tuple(COMMANDS), default="serve", help=commands)
    made.add_argument(
        "--version", action="version", version=f"qgpu-exporter {__version__} (Python {_python()})"
    )
    made.add_argument("--config.file", dest="config_file", metavar="FILE", help="YAML settings.")
    made.add_argument(
        "--output",
        metavar="FILE",
        help="once: write here, atomically, instead of to standard output.",
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, option in config.options():
        if option.group not in groups:
            groups[option.group] = made.add_argument_group(option.group)
        shown = f"{option.help} (default: {option.default_text or 'empty'})".replace("%", "%%")
        groups[option.group].add_argument(
            f"--{option.flag}",
            dest=name,
            action="append",
            nargs="?" if option.is_switch else None,
            const="true" if option.is_switch else None,
            metavar="true|false" if option.is_switch else option.metavar,
            help=shown,
        )
    return made


def run(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run one command; returns its exit code."""
    known = os.environ if environment is None else environment
    given = parser().parse_args(arguments)
    flags = {
        option.flag: getattr(given, name)
        for name, option in config.options()
        if getattr(given, name) is not None
    }
    if given.output and given.command != "once":
        return _refuse("--output goes with the command once")
    try:
        settings = config.load(flags, known, given.config_file)
    except config.ConfigError as error:
        return _refuse(str(error))
    log.setup(settings.log_level, settings.log_format)
    try:
        return asyncio.run(_command(given.command, settings, known, given.output, flags))
    except config.ConfigError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        # `serve` ends well by a signal and never comes here; the others have not done their work.
        return EXIT_FAILED


async def _command(
    command: str,
    settings: config.Settings,
    environment: Mapping[str, str],
    output: str | None,
    flags: Mapping[str, Sequence[str]],
) -> int:
    if command == "once":
        return EXIT_OK if await commands.once(settings, environment, output) else EXIT_FAILED
    if command == "check":
        return EXIT_OK if await commands.check(settings, environment, sys.stdout) else EXIT_FAILED
    if command == "demo":
        return await commands.demo(settings, flags, sys.stdout)
    return await commands.serve(settings, environment)


def _refuse(message: str) -> int:
    print(f"qgpu-exporter: error: {message}", file=sys.stderr)
    logging.shutdown()
    return EXIT_USAGE


def _python() -> str:
    return platform.python_version()
