"""Whether a model reads text and can chat, from its files: before an engine loads it for minutes."""

from __future__ import annotations

import os
from pathlib import Path

from launch.errors import WrongUsage
from pipeline.models.shapes import is_shape, shape_config
from pipeline.text.tokenizer import TOKENIZER_FILES, has_chat_template

NO_TOKENIZER = "this model has no tokenizer, so it reads no text and cannot chat"
NO_TEMPLATE = "this model has no chat template, so it cannot chat: `generate --prompt TEXT` continues a text"


def check_reads_text(folder: Path) -> None:
    """Raises WrongUsage, one line with what to do, for a model without tokenizer, and ModelError for an
    unknown shape. What is no model is left to the loader."""
    if is_shape(folder):
        shape_config(str(folder))
        raise WrongUsage(
            f"{folder} has random weights and no tokenizer, so it reads no text and cannot chat: `bench`"
            " shows its speed, and `generate --prompt-tokens 1,2,3` runs it"
        )
    if os.path.isfile(folder / "config.json") and not _has_tokenizer(folder):
        raise WrongUsage(
            f"{NO_TOKENIZER}: put its tokenizer.json and tokenizer_config.json into {folder}, or use"
            " `generate --prompt-tokens`"
        )


def check_can_chat(folder: Path) -> None:
    """What `check_reads_text` raises; also WrongUsage for a model without chat template, and ModelError for a
    damaged file. Loads no tokenizer: that may not end."""
    check_reads_text(folder)
    if not _has_tokenizer(folder):
        return
    if not has_chat_template(folder):
        raise WrongUsage(NO_TEMPLATE)


def _has_tokenizer(folder: Path) -> bool:
    return any(os.path.isfile(folder / name) for name in TOKENIZER_FILES)
