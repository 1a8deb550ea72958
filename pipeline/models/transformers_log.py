"""What transformers says while it reads a model."""

from __future__ import annotations

import logging


def to_own_log() -> None:
    """Send it to the process's log, as details that `--log-level info` shows: whole paragraphs about settings
    that it doubts, and about faster ways that are none here. Its errors are always shown."""
    from transformers.utils import logging as library

    library.disable_default_handler()
    library.enable_propagation()
    detailed = logging.getLogger().isEnabledFor(logging.INFO)
    library.set_verbosity(logging.WARNING if detailed else logging.ERROR)
