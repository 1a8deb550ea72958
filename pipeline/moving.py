"""The thread that moves weights which a start left in files into memory, while requests are served."""

from __future__ import annotations

import logging
import threading

from pipeline.errors import ModelError
from pipeline.models.backbone import Backbone

JOIN_LIMIT = 5.0  # seconds for the thread to end

log = logging.getLogger(__name__)


class Moving:
    """Ends by itself once everything is moved."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moving", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """It need not have been started, nor have come to its end."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_LIMIT)

    def _run(self) -> None:
        try:
            self._backbone.move(lambda: not self._stopping.is_set())
        except (ModelError, OSError) as e:  # what is still in files can be used there, or says the same
            log.warning(f"the backbone is not in memory as a whole: {e}")
