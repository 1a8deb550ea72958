"""An engine with a gateway, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package")
def served() -> Iterator[object]:
    from gateway_engine import serve  # skips where the extra `serve` is not installed

    with serve() as running:
        yield running
