"""The background thread that copies file-backed weights into memory while the engine serves requests."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pipeline.backbone.backbone import Backbone

JOIN_LIMIT = 1.0  # seconds for the thread to stop; it checks `proceed` every few milliseconds


def start_materializing(backbone: Backbone) -> Callable[[], None]:
    """Start the thread, which ends once no weights are pending. Returns a function that stops it earlier."""
    stopping = threading.Event()

    def stop() -> None:
        stopping.set()
        thread.join(JOIN_LIMIT)

    thread = threading.Thread(
        target=backbone.materialize, args=(lambda: not stopping.is_set(),), name="materialize", daemon=True
    )
    thread.start()
    return stop
