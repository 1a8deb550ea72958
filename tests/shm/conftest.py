"""Fixtures of the shared-memory package's tests."""

import uuid

import pytest

from shm.segment import unlink
from shm.store import store_name


@pytest.fixture
def name():
    """A segment's name."""
    name = f"/tandem-test-{uuid.uuid4().hex[:12]}"
    yield name
    unlink(name)


@pytest.fixture
def fingerprint():
    """A model's fingerprint that no other test uses."""
    fingerprint = uuid.uuid4().hex * 2
    yield fingerprint
    unlink(store_name(fingerprint))
