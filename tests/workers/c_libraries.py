"""The C libraries that setup.py declares."""

from __future__ import annotations

import runpy
from contextlib import chdir
from unittest.mock import patch

from setuptools import Extension

from workers.lifetime import ROOT


def c_libraries() -> list[Extension]:
    with chdir(ROOT), patch("setuptools.setup") as setup:
        runpy.run_path("setup.py")
    return setup.call_args.kwargs["ext_modules"]
