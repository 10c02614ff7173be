"""Loads the driver's library out of a directory that is mounted only after the reader started."""

from __future__ import annotations

import ctypes
import os

LIBRARY = "libnvidia-ml.so.1"


def load_late() -> bool:
    """Load the library from a directory of LD_LIBRARY_PATH, and say whether one had it.

    The C library remembers for the life of a process which directories were not there when it
    first searched (glibc, elf/dl-load.c), so it would never find what a driver's installer puts
    into a new one.  What is loaded by its path also answers to its name, which pynvml asks for.
    """
    for directory in os.environ.get("LD_LIBRARY_PATH", "").replace(";", ":").split(":"):
        path = os.path.join(directory, LIBRARY)
        if directory and os.path.isfile(path):
            try:
                ctypes.CDLL(path)
            except OSError:
                continue  # of another architecture, or not yet written to its end
            return True
    return False
