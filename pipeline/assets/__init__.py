"""Data that is installed with Tandem: the embedded model, held-out text, and published costs."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def model_dir() -> Path:
    """Folder of the embedded model, in Hugging Face layout."""
    return _HERE / "model"


def costs_dir() -> Path:
    """Folder of the costs files that `--costs` accepts by name."""
    return _HERE / "costs"


def items() -> Path:
    """Multiple-choice items from the held-out text, which `benchmarks/embedded_model/items.py` writes."""
    return _HERE / "items.jsonl"


def heldout() -> dict[str, Path]:
    """Kind of text -> UTF-8 file that the embedded model was not trained on."""
    return {path.stem: path for path in sorted((_HERE / "heldout").glob("*.txt"))}
