"""An engine with a gateway for each file of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def served() -> Iterator[object]:
    from gateway_engine import serve  # skips where the extra `serve` is not installed

    with serve() as running:
        yield running
