"""A model in GGUF files, as a checkpoint of Hugging Face of the same model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pipeline.checkpoint.encode import SAME_BITS, encode_experts
from pipeline.checkpoint.gguf_config import Header, config_of
from pipeline.checkpoint.gguf_file import read_model
from pipeline.checkpoint.gguf_names import Names, Source
from pipeline.checkpoint.gguf_reader import TYPES, GgufReader, format_of
from pipeline.checkpoint.headers import TensorEntry
from pipeline.checkpoint.index import BITS, CheckpointIndex, fingerprint
from pipeline.checkpoint.model_source import ModelSource, OwnMatrix
from pipeline.checkpoint.quantized import MAX_NAME
from pipeline.errors import ModelError
from pipeline.models.architecture import ExpertRows, TensorSpec
from pipeline.models.registry import architecture_of, model_spec
from protocol.program import one_line
from shm.store import StoreBuilder


class GgufCheckpoint(ModelSource):
    """The model in a GGUF file, or in several of which this is the first."""

    kind = "checkpoint"
    filling = "encoding the experts"
    fused = False

    def __init__(self, path: Path) -> None:
        """Check settings and tensors against each other. Raises ModelError, one line."""
        settings, shards = read_model(path)
        entries = {name: entry for shard in shards for name, entry in shard.tensors.items()}
        self.name = str(path)
        try:
            header = Header(settings, {name: entry.shape for name, entry in entries.items()})
            self.config = config_of(header)
            self._spec = model_spec(self.config)
            self._names = Names(header, self._spec)
            self._tensors = self._backbone()
            _check(self._required(), entries, self._names)
        except ModelError as e:
            raise ModelError(f"{path}: {str(e).removeprefix('config.json: ')}") from None
        tensors = {name: replace(entry, shape=_matrix(entry.shape)) for name, entry in entries.items()}
        self._index = CheckpointIndex(path.parent, self.config, shards, tensors)
        self._types = {entries[name].dtype for name in self._experts()}  # of the experts
        if self._types - BITS.keys():
            self.quantized = ", ".join(sorted(self._types))
        self.own_format = format_of(self._types)
        self.half, self.kinds = "F16" in self._types, self._kinds()
        self.own_matrices = self._own_matrices()

    def fingerprint(self, format_name: str, tile: int) -> str:
        return fingerprint(self._index, format_name, tile)

    def worth_keeping(self, format_name: str) -> bool:
        if format_name == self.own_format:
            return False
        return any(SAME_BITS.get(kind) != format_name for kind in self._types)

    def tensors(self) -> GgufReader:
        return GgufReader(self._index, self._source)

    def fill(self, builder: StoreBuilder, progress: Callable[[int], None]) -> int:
        with self.tensors() as reader:
            encode_experts(reader, self.locate, builder, progress)
        return reader.bytes_read

    def locate(self, layer: int, expert: int) -> ExpertRows:
        """An expert's location; `layer` counts only layers with experts, as in the store."""
        return self._names.expert(self._spec.moe_layers[layer], expert)

    def _backbone(self) -> dict[str, tuple[str, TensorSpec]]:
        """Role and description of each tensor outside the routed experts, by name."""
        architecture, spec = architecture_of(self.config), self._spec
        groups = [architecture.outer(spec)]
        groups += [architecture.layer(spec, layer, self.fused) for layer in range(spec.layers)]
        return {tensor.name: (role, tensor) for group in groups for role, tensor in group.items()}

    def _source(self, name: str, shape: tuple[int, ...]) -> Source:
        role, tensor = self._tensors.get(name, ("", None))
        if tensor is None or tensor.shape != shape:
            raise ModelError(f"{self.name} has no tensor {name} of shape {list(shape)}")
        return self._names.source(role, tensor)

    def _kinds(self) -> dict[str, str]:
        kinds: dict[str, str] = {}
        for name, (role, tensor) in self._tensors.items():
            types = {self._index.tensors[part].dtype for part, _ in self._names.source(role, tensor).parts}
            if tensor.kind != "float32" and types - {"BF16", "F32"}:
                kinds[name] = ", ".join(sorted(types))
        return kinds

    def _own_matrices(self) -> dict[str, OwnMatrix]:
        """The backbone's matrices that the file has quantized, by name; those of types that are read as
        numbers would be kept in int8."""
        own: dict[str, OwnMatrix] = {}
        for name, (role, tensor) in self._tensors.items():
            parts = self._names.source(role, tensor).parts
            types = {self._index.tensors[part].dtype for part, _ in parts}
            if len(tensor.shape) == 2 and not types & BITS.keys():
                own[name] = OwnMatrix(format_of(types) or "int8", (tensor.shape[0], tensor.shape[1]))
        return own

    def _experts(self) -> list[str]:
        """The names of the experts' matrices in the file."""
        layers = self._names.expert_shapes.values()
        return [name for shapes in layers for name in shapes if name.endswith(".weight")]

    def _required(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors that the file must have, by its names."""
        shapes: dict[str, tuple[int, ...]] = {}
        for role, tensor in self._tensors.values():
            shapes |= self._names.source(role, tensor).parts
        for of_layer in self._names.expert_shapes.values():
            shapes |= of_layer
        return shapes


def _check(required: dict[str, tuple[int, ...]], entries: dict[str, TensorEntry], names: Names) -> None:
    """Raises ModelError, one line, for missing, unknown or misshapen tensors, and for types that are not
    read."""
    for name, shape in required.items():
        entry = entries.get(name)
        if entry is None:
            raise ModelError(f"it lacks the tensor {name}: download it again, or another file of this model")
        if _without_ones(entry.shape) != _without_ones(shape):
            raise ModelError(
                f"the tensor {name} has the shape {list(entry.shape)}; the settings give {list(shape)}"
            )
        if entry.dtype not in TYPES:
            raise ModelError(
                f"the tensor {name} has the type {entry.dtype}, which is not read: download the model in "
                "another one, like Q4_K_M or Q8_0"
            )
    for name in sorted(entries.keys() - required.keys()):
        if not names.unread(name):
            raise ModelError(
                f"the tensor {one_line(name[:MAX_NAME])} is not one of this architecture: the model is of a"
                " variant that is not supported"
            )


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """llama.cpp drops, and adds, sizes of 1."""
    return tuple(size for size in shape if size != 1)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """All rows, and the size of one."""
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, shape[-1]
