"""The C libraries that are compiled at installation, beside the modules that use them."""

from __future__ import annotations

import ctypes
from importlib.machinery import PathFinder
from pathlib import Path

from shm.errors import NotCompiled


def load(module: str, name: str, version: int) -> ctypes.CDLL:
    """The library of this name beside a module's file. Raises NotCompiled, also for one of another version,
    which an older checkout left behind."""
    spec = PathFinder.find_spec(name, [str(Path(module).parent)])
    try:
        functions = None if spec is None or spec.origin is None else ctypes.CDLL(spec.origin)
        if functions is not None and functions[f"tandem{name}_version"]() == version:
            return functions
    except (OSError, AttributeError):
        pass
    raise NotCompiled(name)
