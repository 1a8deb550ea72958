"""The model's router, as a replay has it."""

from __future__ import annotations

from pipeline.arrays import FloatArray
from pipeline.models.routing import Router
from pipeline.policies.view import Routing


class RecordedRouter:
    """The model's router. Of a layer's own logits it answers what was recorded: they are kept as float16, and
    their rounding could exchange two experts that are nearly equal."""

    def __init__(self, model: Router) -> None:
        self._model = model
        self._logits: FloatArray | None = None
        self._said: Routing

    def layer(self, logits: FloatArray | None, said: Routing) -> None:
        """From now on these are the layer's own logits, and what was said of them."""
        self._logits, self._said = logits, said

    def __call__(self, logits: FloatArray) -> Routing:
        return self._said if logits is self._logits else self._model(logits)
