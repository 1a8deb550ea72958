"""What Tandem carries: a model, held-out text, the scripts that made them, and costs that were published."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def model_dir() -> Path:
    """Folder of the embedded model in Hugging Face layout."""
    return _HERE / "model"


def costs_dir() -> Path:
    """Folder of the costs files that `--costs` can name without their folder and suffix."""
    return _HERE / "costs"


def heldout() -> dict[str, Path]:
    """Kind of text -> UTF-8 file that training never saw."""
    return {path.stem: path for path in sorted((_HERE / "heldout").glob("*.txt"))}
