"""What tests of the C kernels share: the variants that run here."""

from __future__ import annotations

import pytest

from workers.kernels.native import VARIANTS, Library, load


@pytest.fixture(params=VARIANTS)
def library(request: pytest.FixtureRequest) -> Library:
    found = load(request.param)
    if isinstance(found, str):
        pytest.skip(f"{VARIANTS[request.param]}: {found}")
    return found
