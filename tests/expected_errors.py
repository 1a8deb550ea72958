"""Errors for a user: one line that says what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def expect_error(
    error: type[Exception], call: Callable[..., Any], *arguments: Any, match: str | None = None, **named: Any
) -> str:
    """The text of the error that the call must raise: one line, and the pattern `match` is in it."""
    with pytest.raises(error, match=match) as caught:
        call(*arguments, **named)
    text = str(caught.value)
    assert text.strip()
    assert "\n" not in text
    return text
