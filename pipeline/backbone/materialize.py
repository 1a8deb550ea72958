"""The thread that moves weights which a start left in files into memory, while requests are served."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pipeline.backbone.backbone import Backbone

JOIN_LIMIT = 1.0  # seconds for the thread to end; it looks whether to go on every few milliseconds


def start_moving(backbone: Backbone) -> Callable[[], None]:
    """Start it; it ends by itself once everything is moved. Returns what ends it before."""
    stopping = threading.Event()

    def stop() -> None:
        stopping.set()
        thread.join(JOIN_LIMIT)

    thread = threading.Thread(
        target=backbone.move, args=(lambda: not stopping.is_set(),), name="moving", daemon=True
    )
    thread.start()
    return stop
