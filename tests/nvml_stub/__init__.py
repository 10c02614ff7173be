"""A libnvidia-ml.so.1 for tests: builds `stub.c` and writes the file that it answers from."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("stub.c")
LIBRARY = "libnvidia-ml.so.1"
_DIRECTORY = tempfile.TemporaryDirectory(prefix="nvml-stub-")

Values = Mapping[str, object]


@functools.cache
def library(*, old_driver: bool = False) -> Path:
    """The compiled library, one for the whole test process; `old_driver` lacks newer symbols."""
    directory = Path(_DIRECTORY.name) / ("old" if old_driver else "new")
    directory.mkdir()
    options = ["-DOLD_DRIVER"] if old_driver else []
    command = [os.environ.get("CC", "cc"), "-std=gnu11", "-O1", "-Wall", "-Werror", "-shared"]
    # As the real one: what is loaded by its path is also found by its name.
    options.append(f"-Wl,-soname,{LIBRARY}")
    made = directory / LIBRARY
    subprocess.run(
        [*command, "-fPIC", *options, "-o", str(made), str(SOURCE), "-lpthread"], check=True
    )
    return made


def card(values: Values, index: int = 0) -> dict[str, object]:
    """The values of a card, as `presets` give them, under its index."""
    return {f"{index}.{key}": value for key, value in values.items()}


class Stub:
    """The answers of one node: a file that may be changed while the library reads from it.

    A value of None takes its key away.
    """

    def __init__(
        self, directory: Path, cards: Iterable[Values] = (), *, old_driver: bool = False
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.library = library(old_driver=old_driver)
        self._file = directory / "nvml.txt"
        self._calls = directory / "calls.txt"
        self._values: dict[str, object] = {}
        present = list(cards)
        self.set(SYSTEM | {"count": len(present)})
        for index, values in enumerate(present):
            self.set(card(values, index))

    def set(self, values: Values) -> None:
        """Change some values at once."""
        for key, value in values.items():
            if value is None:
                self._values.pop(key, None)
            else:
                self._values[key] = value
        made = self._file.with_suffix(".new")
        lines = (f"{key}={value}\n" for key, value in self._values.items())
        made.write_text("".join(lines), encoding="utf-8")
        made.rename(self._file)

    def environment(self) -> dict[str, str]:
        """For the process that loads the library."""
        return {
            "LD_LIBRARY_PATH": str(self.library.parent),
            "NVML_STUB_FILE": str(self._file),
            "NVML_STUB_CALLS": str(self._calls),
        }

    def calls(self) -> list[str]:
        """Every call until now: ``<function>``, ``<function> <card>`` or
        ``<function> <card>.<MIG index>``."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        # How often its thread waits for events depends on the time alone.
        return [line for line in lines if line != "nvmlEventSetWait_v2"]

    def forget_calls(self) -> None:
        """Begin a new list."""
        self._calls.unlink(missing_ok=True)


SYSTEM: dict[str, object] = {
    "nvmlSystemGetDriverVersion": "580.95.05",
    "nvmlSystemGetNVMLVersion": "13.580.95.05",
    "nvmlSystemGetCudaDriverVersion": 13000,
}
