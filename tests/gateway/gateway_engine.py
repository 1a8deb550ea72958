"""Helper of these tests: an engine with a gateway."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest
from fork_server import ForkedPython

LAUNCH = str(Path(__file__).parents[2] / "launch.py")
START_SECONDS = 60.0
for package in ("uvicorn", "httptools", "prometheus_client"):
    pytest.importorskip(package, reason="of the extra `serve`")


@dataclass
class Served:
    """A running `launch.py serve --http`."""

    url: str
    endpoint: str
    process: subprocess.Popen[str]

    def child(self, module: str) -> psutil.Process:
        """The child that runs this module."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if module in process.cmdline():
                    return process
            except psutil.Error:
                continue
        raise LookupError(module)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)


@contextmanager
def serve(*options: str) -> Iterator[Served]:
    """An engine of the embedded model with a gateway at a free port."""
    name = f"h{os.getpid()}-{time.monotonic_ns() % 100000}"
    arguments = ("serve", "--http", "127.0.0.1:0", "--name", name, "--chunk", "64", *options)
    with tempfile.TemporaryFile("w+") as log:
        process = ForkedPython(LAUNCH, *arguments, stdout=subprocess.PIPE, stderr=log)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            log.seek(0)
            written = log.read()
            found = re.search(r"HTTP is served at (\S+)", written)
            assert found, written
            yield Served(found[1], line.split()[1], process)
            process.terminate()
            process.wait(START_SECONDS)
        finally:
            process.kill()
            process.wait(START_SECONDS)
            if process.stdout is not None:
                process.stdout.close()
