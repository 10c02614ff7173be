"""A libnvidia-ml.so.1 for tests: builds `stub.c` and writes the file that it answers from."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("stub.c")
LIBRARY = "libnvidia-ml.so.1"

Values = Mapping[str, object]


def build(directory: Path, *, old_driver: bool = False) -> Path:
    """Compile the library into `directory` and return it; `old_driver` lacks the newer symbols.

    Tests that run at the same time may build it at the same time: it is moved into place.
    """
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / LIBRARY
    made = directory / f"{LIBRARY}.{os.getpid()}"
    options = ["-DOLD_DRIVER"] if old_driver else []
    command = [os.environ.get("CC", "cc"), "-std=gnu11", "-O1", "-Wall", "-Werror", "-shared"]
    subprocess.run(
        [*command, "-fPIC", *options, "-o", str(made), str(SOURCE), "-lpthread"], check=True
    )
    made.rename(library)
    return library


def card(values: Values, index: int = 0) -> dict[str, object]:
    """The values of a card, as `presets` give them, under its index."""
    return {f"{index}.{key}": value for key, value in values.items()}


class Stub:
    """The answers of one node: a file that may be changed while the library reads from it.

    A value of None takes its key away.
    """

    def __init__(self, directory: Path, library: Path, cards: Iterable[Values] = ()) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.library = library
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
        return self._calls.read_text().splitlines() if self._calls.exists() else []

    def forget_calls(self) -> None:
        """Begin a new list."""
        self._calls.unlink(missing_ok=True)


SYSTEM: dict[str, object] = {
    "nvmlSystemGetDriverVersion": "580.95.05",
    "nvmlSystemGetNVMLVersion": "13.580.95.05",
    "nvmlSystemGetCudaDriverVersion": 13000,
}
