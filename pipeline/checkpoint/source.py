"""A Hugging Face checkpoint's folder as a model to load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.checkpoint.encode import encode_experts
from pipeline.checkpoint.index import CheckpointIndex, fingerprint
from pipeline.checkpoint.reader import TensorReader
from pipeline.models.registry import architecture_of
from pipeline.models.source import ModelSource
from shm.store import StoreBuilder


class Checkpoint(ModelSource):
    """The model in one folder."""

    kind = "checkpoint"
    filling = "encoding the experts"
    cached = True

    def __init__(self, folder: Path) -> None:
        """Read config.json and the headers. Raises ModelError."""
        self._index = CheckpointIndex.open(folder)
        self.name = str(folder)
        self.config = self._index.config

    def fingerprint(self, format_name: str, tile: int) -> str:
        return fingerprint(self._index, format_name, tile)

    def tensors(self) -> TensorReader:
        return TensorReader(self._index)

    def fill(self, builder: StoreBuilder, progress: Callable[[int], None]) -> int:
        with TensorReader(self._index) as reader:
            encode_experts(reader, architecture_of(self.config).expert_names, builder, progress)
        return reader.bytes_read
