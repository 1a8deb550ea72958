"""A private runtime directory with a path short enough for sockets."""

import shutil
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def runtime():
    path = Path(tempfile.mkdtemp(prefix="tandem-test-"))  # mode 0700; tmp_path can be too long for a socket
    yield path
    shutil.rmtree(path)
