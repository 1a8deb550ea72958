"""The model that Tandem carries: weights, tokenizer, held-out text, and the scripts that made them."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def model_dir() -> Path:
    """Folder of the embedded model in Hugging Face layout."""
    return _HERE / "model"


def heldout() -> dict[str, Path]:
    """Kind of text -> UTF-8 file that training never saw."""
    return {path.stem: path for path in sorted((_HERE / "heldout").glob("*.txt"))}
