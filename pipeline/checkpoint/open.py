"""Opens the model that `--model` names: a Hugging Face checkpoint folder, a GGUF file, or a shape with random
weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.checkpoint.encode import SAME_BITS, encode_experts
from pipeline.checkpoint.headers import TensorEntry
from pipeline.checkpoint.index import (
    BITS,
    CONFIG_FILE,
    CheckpointIndex,
    check_tensors,
    fingerprint,
    read_fields,
)
from pipeline.checkpoint.model_source import ModelSource, OwnMatrix
from pipeline.checkpoint.packed import Packed
from pipeline.checkpoint.random_model import RandomModel
from pipeline.checkpoint.reader import TensorReader
from pipeline.checkpoint.whole_experts import Part, WholeExperts
from pipeline.errors import ModelError
from pipeline.models.architecture import Architecture, ExpertRows
from pipeline.models.config_keys import DRAFTS
from pipeline.models.facts import Headers, check_headers, facts_of, is_own
from pipeline.models.registry import architecture_of, model_spec
from pipeline.models.shapes import is_gguf, is_shape, short_name
from pipeline.models.spec import ModelSpec
from shm.codes import format_of_all
from shm.store import StoreBuilder

if TYPE_CHECKING:
    from pipeline.checkpoint.converted import ConvertedTensors


EXPERT = re.compile(r"(^|\.)experts\.")  # in the name of a routed expert's matrix


def open_model(model: Path) -> ModelSource:
    """The checkpoint in this folder or GGUF file, or random weights for a shape:NAME. Reads no weights.
    Raises ModelError, one line, where the model does not exist or cannot be used."""
    if is_shape(model):
        return RandomModel(str(model))
    if is_gguf(model):
        from pipeline.checkpoint.gguf_generic import generic_index  # the gguf package takes a while
        from pipeline.checkpoint.gguf_model import GgufCheckpoint

        found = generic_index(model)
        return GgufCheckpoint(model) if found is None else ConvertedCheckpoint(found, model)
    index = CheckpointIndex.open(model)
    stacked = any(len(matrix.shape) > 2 for matrix in index.packed.values())  # those of all experts
    if is_own(index.config) and not stacked:
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
        plain, headers = self._index.config, self._index.headers
        self._architecture = architecture_of(plain)
        spec = model_spec(plain)
        self.fused = self._architecture.is_fused(headers, spec)
        check_tensors(self._index, self._architecture, spec, self.fused)
        drafts = _drafts(self._architecture, spec, self.fused, headers)
        self.config = {**plain, DRAFTS: True} if drafts else plain
        self._spec = replace(spec, drafts=drafts)
        packed = self._index.packed
        own, every = (self._experts(), self._experts(self._spec.deeper)) if packed else ((), ())
        self.quantized, self.own_format = _kinds(packed.get(name) for name in own)
        self._whole = any(packed[name].whole for name in every if name in packed)
        specs = list(self._architecture.backbone(self._spec, self.fused))
        backbone = {tensor.name for tensor in specs}
        self.own_matrices = {
            name: _own_matrix(matrix) for name, matrix in self._index.packed.items() if name in backbone
        }
        self.kinds = _kinds_of(self._index, {tensor.name for tensor in specs if tensor.kind != "float32"})
        self.half = any(_is_half(self._index, name) for name in self._experts())

    def fingerprint(self, format_name: str, tile: int) -> str:
        more = "with the layer that drafts" if self._spec.drafts and tile else ""  # in a store alone
        return fingerprint(self._index, format_name, tile, more)

    def worth_keeping(self, format_name: str) -> bool:
        """False where the store has the checkpoint's bits: reading the checkpoint again is about as fast."""
        if format_name == self.own_format:
            return False
        names = self._experts()
        if any(name in self._index.packed for name in names):
            return True
        return any(SAME_BITS.get(self._index.tensors[name].dtype) != format_name for name in names)

    def tensors(self) -> TensorReader:
        return TensorReader(self._index)

    def fill(self, builder: StoreBuilder, progress: Callable[[int], None]) -> int:
        with TensorReader(self._index) as reader:
            if not self._whole:
                encode_experts(reader, self.locate, builder, progress)
                return reader.bytes_read

            def read(layer: int, expert: int) -> list[Part]:
                return [reader.rows(part, 0, part.rows) for part in self.locate(layer, expert)]

            with WholeExperts(self.locate, read) as experts:
                encode_experts(experts, experts.locate, builder, progress)
            return reader.bytes_read

    def _experts(self, of: ModelSpec | None = None) -> set[str]:
        """The names of the experts' matrices; by default without those of the layer that drafts, which are
        often not quantized as the model's, and kept like these: no token depends on them."""
        shape = len((of or self._spec).moe_layers), self._spec.experts
        number = self._spec.math.matrices
        return {part.name for place in np.ndindex(shape) for part in self.locate(*place)[:number]}

    def locate(self, layer: int, expert: int) -> ExpertRows:
        """An expert's location; `layer` counts only layers with experts, as in the store."""
        moe_layers = self._spec.deeper.moe_layers
        return self._architecture.expert(self._spec, moe_layers[layer], expert, self.fused)


def _drafts(architecture: Architecture, spec: ModelSpec, fused: bool, headers: Headers) -> bool:
    """Returns whether a checkpoint has the whole of a layer that drafts, behind one with experts."""
    last = spec.layers
    if not spec.extra_layers or spec.moe_layers[-1] != last - 1:
        return False
    *_, layer = architecture.layers(replace(spec, drafts=True), fused)
    shapes = {tensor.name: tensor.shape for tensor in layer.values()}
    for expert in range(1 if fused else spec.experts):
        shapes |= {part.name: part.shape for part in architecture.expert(spec, last, expert, fused)}
    found = [headers.get(name, ("", ())) for name in shapes]
    known = all(dtype in BITS for dtype, _ in found)
    return known and [shape for _, shape in found] == [*shapes.values()]


class ConvertedCheckpoint(ModelSource):
    """The model in a folder or GGUF file, of any family and in any layout; read as transformers reads it,
    which takes importing it: a child process of the supervisor's, and the processes that read weights, do."""

    kind = "checkpoint"
    filling = "converting the experts"
    fused = True  # names are those of transformers' own parameters

    def __init__(self, index: CheckpointIndex, file: Path | None = None) -> None:
        """Check config.json and the headers against each other. Raises ModelError, one line. `file`: the
        GGUF file that is indexed, of tensors with the names of the model's parameters."""
        self._index = index
        self.name = str(file or index.folder)
        self.config = index.config
        tables = facts_of(self.config).tables  # what cannot be run is said first
        on_disk = {table.name.rpartition(".")[2] for table in tables}
        try:
            self.note = check_headers(self.config, index.headers)
        except ModelError as e:
            raise ModelError(f"{file or index.listing}: {e}") from None
        matrices: list[Packed | None] = [m for name, m in index.packed.items() if EXPERT.search(name)]
        if matrices and any(EXPERT.search(name) and _is_matrix(name, e) for name, e in index.tensors.items()):
            matrices.append(None)
        self.quantized, self.own_format = _kinds(matrices)
        beside = {n for n in index.headers if not EXPERT.search(n) and on_disk.isdisjoint(n.split("."))}
        self.kinds = _kinds_of(index, beside)
        self.half = any(_is_half(index, name) for name in index.tensors if EXPERT.search(name))
        if file is not None:
            others = {name: m for name, m in index.packed.items() if name in beside}
            self.own_matrices = {name: _own_matrix(matrix) for name, matrix in others.items()}

    def fingerprint(self, format_name: str, tile: int) -> str:
        return fingerprint(self._index, format_name, tile, f"transformers {version('transformers')}")

    def worth_keeping(self, format_name: str) -> bool:
        return format_name != self.own_format

    @contextmanager
    def tensors(self) -> Iterator[ConvertedTensors]:
        from pipeline.checkpoint.converted import ConvertedTensors, conversion_of

        headers = self._index.headers
        with TensorReader(self._index) as reader:
            yield ConvertedTensors(conversion_of(self.config, [*headers]), reader, headers)

    def fill(self, builder: StoreBuilder, progress: Callable[[int], None]) -> int:
        from pipeline.checkpoint.converted import conversion_of
        from pipeline.checkpoint.converted_experts import ConvertedExperts

        with TensorReader(self._index) as reader:
            headers = self._index.headers
            conversion = conversion_of(self.config, [*headers])
            with ConvertedExperts(conversion, reader, headers) as experts:
                encode_experts(experts, experts.locate, builder, progress)
            return reader.bytes_read


def _is_matrix(name: str, entry: TensorEntry) -> bool:
    return len(entry.shape) > 1 and "bias" not in name


def _own_matrix(matrix: Packed) -> OwnMatrix:
    return OwnMatrix(matrix.format or "int8", (matrix.outputs, matrix.inputs))


def _is_half(index: CheckpointIndex, name: str) -> bool:
    entry = index.tensors.get(name)
    return entry is not None and entry.dtype == "F16" and _is_matrix(name, entry)


def _kinds_of(index: CheckpointIndex, names: Iterable[str]) -> dict[str, str]:
    """Returns `ModelSource.kinds` for these tensors."""
    half = {name: "F16" for name in names if _is_half(index, name)}
    return half | {name: index.packed[name].kind for name in names if name in index.packed}


def _kinds(matrices: Iterable[Packed | None]) -> tuple[str, str | None]:
    """Returns the user's name of these matrices of experts, and the native format that keeps them all."""
    kinds = {("", None) if matrix is None else (matrix.kind, matrix.format) for matrix in matrices}
    names, formats = {name for name, _ in kinds if name}, {format for _, format in kinds if format}
    whole = all(format for _, format in kinds)
    if names and ("", None) in kinds:
        names.add("plain")
    return " and ".join(sorted(names)), format_of_all(formats) if whole else None
