"""A model in a Hugging Face checkpoint folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from pipeline.checkpoint.chunks import SAME_BITS
from pipeline.checkpoint.encode import encode_experts
from pipeline.checkpoint.index import CheckpointIndex, fingerprint
from pipeline.checkpoint.model_source import ModelSource
from pipeline.checkpoint.reader import TensorReader
from pipeline.checkpoint.tensors import check_tensors
from pipeline.models.architecture import ExpertRows
from pipeline.models.registry import architecture_of, model_spec
from shm.store import StoreBuilder


class Checkpoint(ModelSource):
    """The model in a folder."""

    kind = "checkpoint"
    filling = "encoding the experts"

    def __init__(self, folder: Path) -> None:
        """Check config.json and the headers against each other. Raises ModelError, one line."""
        self._index = CheckpointIndex.open(folder)
        self.name = str(folder)
        self.config = self._index.config
        self._architecture = architecture_of(self.config)
        self._spec = model_spec(self.config)
        self.fused = self._architecture.is_fused(self._index.tensors, self._spec)
        check_tensors(self._index, self._architecture, self._spec, self.fused)

    def fingerprint(self, format_name: str, tile: int) -> str:
        return fingerprint(self._index, format_name, tile)

    def worth_keeping(self, format_name: str) -> bool:
        """False where the store has the checkpoint's bits: reading the checkpoint again is about as fast."""
        shape = len(self._spec.moe_layers), self._spec.experts
        names = {part.name for place in np.ndindex(shape) for part in self._locate(*place)}
        return any(SAME_BITS.get(self._index.tensors[name].dtype) != format_name for name in names)

    def tensors(self) -> TensorReader:
        return TensorReader(self._index)

    def fill(self, builder: StoreBuilder, progress: Callable[[int], None]) -> int:
        with TensorReader(self._index) as reader:
            encode_experts(reader, self._locate, builder, progress)
        return reader.bytes_read

    def _locate(self, layer: int, expert: int) -> ExpertRows:
        """An expert's location; `layer` counts only layers with experts, as in the store."""
        return self._architecture.expert(self._spec, self._spec.moe_layers[layer], expert, self.fused)
