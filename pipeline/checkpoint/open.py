"""Opens the model that `--model` names: a Hugging Face checkpoint folder, a GGUF file, or a shape with random
weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.checkpoint.encode import SAME_BITS, encode_experts
from pipeline.checkpoint.index import CONFIG_FILE, CheckpointIndex, check_tensors, fingerprint, read_fields
from pipeline.checkpoint.model_source import ModelSource
from pipeline.checkpoint.random_model import RandomModel
from pipeline.checkpoint.reader import TensorReader
from pipeline.errors import ModelError
from pipeline.models.architecture import ExpertRows
from pipeline.models.facts import check_headers, facts_of, is_own
from pipeline.models.registry import architecture_of, model_spec
from pipeline.models.shapes import is_gguf, is_shape, short_name
from shm.store import StoreBuilder

if TYPE_CHECKING:
    from pipeline.checkpoint.converted import ConvertedTensors


def open_model(model: Path) -> ModelSource:
    """The checkpoint in this folder or GGUF file, or random weights for a shape:NAME. Reads no weights.
    Raises ModelError, one line, where the model does not exist or cannot be used."""
    if is_shape(model):
        return RandomModel(str(model))
    if is_gguf(model):
        from pipeline.checkpoint.gguf_model import GgufCheckpoint  # the gguf package takes a while

        return GgufCheckpoint(model)
    index = CheckpointIndex.open(model)
    if is_own(index.config) and not index.config.get("quantization_config"):
        return Checkpoint(model, index)
    return ConvertedCheckpoint(index)


def open_config(model: Path) -> ModelSource:
    """The model, or what its config says where its folder holds no weights, as for one of the Hub that is not
    downloaded. Raises ModelError."""
    config = model / CONFIG_FILE
    if is_shape(model) or is_gguf(model) or not config.exists() or any(model.glob("*.safetensors*")):
        return open_model(model)
    return RandomModel(short_name(str(model)), read_fields(config))


class Checkpoint(ModelSource):
    """The model in a folder, of a family of our own."""

    kind = "checkpoint"
    filling = "encoding the experts"

    def __init__(self, folder: Path, index: CheckpointIndex | None = None) -> None:
        """Check config.json and the headers against each other. Raises ModelError, one line."""
        self._index = CheckpointIndex.open(folder) if index is None else index
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
        if format_name == self.own_format:
            return False
        shape = len(self._spec.moe_layers), self._spec.experts
        names = {part.name for place in np.ndindex(shape) for part in self.locate(*place)}
        return any(SAME_BITS.get(self._index.tensors[name].dtype) != format_name for name in names)

    def tensors(self) -> TensorReader:
        return TensorReader(self._index)

    def fill(self, builder: StoreBuilder, progress: Callable[[int], None]) -> int:
        with TensorReader(self._index) as reader:
            encode_experts(reader, self.locate, builder, progress)
        return reader.bytes_read

    def locate(self, layer: int, expert: int) -> ExpertRows:
        """An expert's location; `layer` counts only layers with experts, as in the store."""
        return self._architecture.expert(self._spec, self._spec.moe_layers[layer], expert, self.fused)


class ConvertedCheckpoint(ModelSource):
    """The model in a folder, of any family, in any layout, or quantized; read as transformers reads it, which
    takes importing it: a child process of the supervisor's, and the processes that read weights, do."""

    kind = "checkpoint"
    filling = "converting the experts"
    fused = True  # names are those of transformers' own parameters

    def __init__(self, index: CheckpointIndex) -> None:
        """Check config.json and the headers against each other. Raises ModelError, one line."""
        self._index = index
        self.name = str(index.folder)
        self.config = index.config
        facts_of(self.config)  # what cannot be run is said first
        try:
            self.note = check_headers(self.config, index.headers)
        except ModelError as e:
            raise ModelError(f"{index.listing}: {e}") from None

    def fingerprint(self, format_name: str, tile: int) -> str:
        return fingerprint(self._index, format_name, tile)

    def worth_keeping(self, format_name: str) -> bool:
        return format_name != self.own_format

    @contextmanager
    def tensors(self) -> Iterator[ConvertedTensors]:
        from pipeline.checkpoint.converted import ConvertedTensors, conversion_of

        headers = self._index.headers
        with TensorReader(self._index) as reader:
            yield ConvertedTensors(conversion_of(self.config, [*headers]), reader, headers)

    def fill(self, builder: StoreBuilder, progress: Callable[[int], None]) -> int:
        from pipeline.checkpoint.converted import ConvertedExperts, conversion_of

        with TensorReader(self._index) as reader:
            headers = self._index.headers
            conversion = conversion_of(self.config, [*headers])
            with ConvertedExperts(conversion, reader, headers) as experts:
                encode_experts(experts, experts.locate, builder, progress)
            return reader.bytes_read
