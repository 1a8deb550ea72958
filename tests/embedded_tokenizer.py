"""The embedded model's tokenizer, for tests of grammars."""

from __future__ import annotations

import pytest

from pipeline.assets import model_dir
from pipeline.text.tokenizer import Tokenizer


def embedded_tokenizer() -> Tokenizer:
    """Returns the tokenizer; skips the test where grammars cannot be compiled."""
    pytest.importorskip("llguidance", reason="of the extra `serve`")
    tokenizer = Tokenizer.load(model_dir())
    assert tokenizer is not None
    return tokenizer
