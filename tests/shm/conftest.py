"""Fixtures of the shared-memory package's tests."""

import uuid

import pytest

from shm.segment import unlink
from shm.store import store_name


@pytest.fixture
def fingerprint():
    """A model's fingerprint that no other test uses."""
    fingerprint = uuid.uuid4().hex * 2
    yield fingerprint
    unlink(store_name(fingerprint))
