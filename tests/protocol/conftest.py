"""A private runtime directory with a path short enough for sockets, and a socket in it."""

import shutil
import tempfile
from pathlib import Path

import pytest
import zmq

from protocol.sockets import ipc_endpoint


@pytest.fixture
def runtime():
    path = Path(tempfile.mkdtemp(prefix="tandem-test-"))  # mode 0700; tmp_path can be too long for a socket
    yield path
    shutil.rmtree(path)


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


@pytest.fixture
def endpoint(runtime):
    return ipc_endpoint(runtime, "client.sock")
