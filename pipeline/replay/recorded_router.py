"""The model's router in a replay."""

from __future__ import annotations

from pipeline.arrays import FloatArray
from pipeline.models.routing import Router
from pipeline.policies.view import Routing


class RecordedRouter:
    """The model's router. For a layer's own logits it returns the recorded routing, because the logits are
    recorded as float16, and their rounding could exchange two experts that are nearly equal."""

    def __init__(self, model: Router) -> None:
        self._model = model
        self._logits: FloatArray | None = None
        self._routing: Routing

    def layer(self, logits: FloatArray | None, routing: Routing) -> None:
        """Set the present layer's own logits and the routing that was recorded for them."""
        self._logits, self._routing = logits, routing

    def __call__(self, logits: FloatArray) -> Routing:
        return self._routing if logits is self._logits else self._model(logits)
