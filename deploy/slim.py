"""Makes a virtual environment small and the same each time; runs in the image's build stage.

Removes what is never imported, compiles the rest once, and sets every file's time.
"""

from __future__ import annotations

import compileall
import os
import py_compile
import shutil
import sys
from pathlib import Path

UNUSED_FOLDERS = ("test", "tests", "e2e_test", "__pycache__")
UNUSED_SUFFIXES = (".c", ".h", ".pxd", ".pxi", ".pyi", ".pyx", ".typed")
COMPILED_ONLY = ("kubernetes_asyncio",)
"""A thousand generated modules: as bytecode without docstrings they are a third."""


def remove_unused(site: Path) -> None:
    """Remove tests, sources of extensions and stubs of the dependencies."""
    for folder in [p for p in site.rglob("*") if p.is_dir() and p.name in UNUSED_FOLDERS]:
        shutil.rmtree(folder, ignore_errors=True)
    for path in [p for p in site.rglob("*") if p.suffix in UNUSED_SUFFIXES]:
        path.unlink()


def compile_all(site: Path) -> None:
    """Bytecode that is valid whatever the files' times are; some packages keep nothing else."""
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    for name in COMPILED_ONLY:
        folder = site / name
        if not compileall.compile_dir(
            folder, stripdir=str(site), quiet=1, legacy=True, optimize=2, invalidation_mode=mode
        ):
            raise SystemExit(f"{folder}: cannot be compiled")
        for source in list(folder.rglob("*.py")):
            source.unlink()
    compileall.compile_dir(site, stripdir=str(site), quiet=1, invalidation_mode=mode)


def main() -> None:
    """Slim the environment that is the first argument."""
    root = Path(sys.argv[1])
    (site,) = root.glob("lib/python3*/site-packages")
    remove_unused(site)
    compile_all(site)
    moment = int(os.environ["SOURCE_DATE_EPOCH"])
    for path in [root, *root.rglob("*")]:
        os.utime(path, (moment, moment), follow_symlinks=False)


if __name__ == "__main__":
    main()
