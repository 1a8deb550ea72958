"""The experts of a checkpoint of any family and layout, as transformers reads them.

Quantized matrices are converted as the numbers that they mean, unless each row of gate, up and down is a row
of one of them: then an expert keeps their codes. That is found out by converting numbers that say their own
place, once for each kind of layer.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.checkpoint.converted import Conversion, Source, like_tensor, raw_of, read_tensor
from pipeline.checkpoint.decoder import MATRICES, matrices_of
from pipeline.checkpoint.reader import RawTensor, TensorReader, raw_tensor
from pipeline.checkpoint.whole_experts import Part, WholeExperts
from pipeline.models.architecture import ExpertRows, TensorRows
from pipeline.models.facts import Headers
from shm.codes import Codes
from shm.fp8 import BLOCK

TWO = ("gate_up_proj", "up_proj", "down_proj")  # the parameters that have an expert's matrices
BIASES = ("gate_up_proj_bias", "up_proj_bias")
PLACES = 1 << 24  # more than a matrix has rows, or columns


class ConvertedExperts(WholeExperts):
    """The experts of a checkpoint, for `encode_experts`."""

    def __init__(self, conversion: Conversion, reader: TensorReader, headers: Headers) -> None:
        super().__init__(self._located, self._converted)
        self._conversion, self._reader = conversion, reader
        self._read = partial(read_tensor, reader, headers)
        self._like = conversion.expert(0, 0, partial(like_tensor, headers))
        self._shapes = [tuple(m.shape) for m in matrices_of(conversion.modules[0], self._like)]
        self._kept: dict[Any, list[_Kept]] = {}  # what layers of one kind keep
        self._lock = threading.Lock()  # guards it

    def _located(self, layer: int, expert: int) -> ExpertRows:
        name = f"{self._conversion.names[layer]}.{expert}"
        return tuple(TensorRows(f"{name}:{n}", shape, 0, shape[0]) for n, shape in enumerate(self._shapes))

    def _converted(self, layer: int, expert: int) -> list[Part]:
        conversion = self._conversion
        sources = conversion.sources(layer, expert, TWO)
        kept = self._kept_of(layer) if all(name in self._reader.packed for name, _ in sources) else []
        packed = {n: self._packed(*sources[n]) for n in {of.source for of in kept}}
        parts = self._like | conversion.expert(layer, expert, self._read, BIASES if kept else MATRICES)
        others = matrices_of(conversion.modules[layer], parts)[len(kept) :]
        return [of.rows_in(packed[of.source]) for of in kept] + [raw_of(m.contiguous()) for m in others]

    def _packed(self, name: str, place: int | None) -> Part:
        return self._reader.packed_rows(name, 0, self._reader.packed[name].outputs, place)

    def _kept_of(self, layer: int) -> list[_Kept]:
        """The rows of gate, up and down, if all are rows of quantized matrices; else none."""
        sources = self._conversion.sources(layer, 0, TWO)
        places = self._conversion.experts[layer].values()
        kind = (
            *(id(place.converter) for place in places),
            *(self._reader.packed[n].shape for n, _ in sources),
        )
        with self._lock:
            if kind not in self._kept:
                self._kept[kind] = self._find_kept(layer, {source: n for n, source in enumerate(sources)})
            return self._kept[kind]

    def _find_kept(self, layer: int, number: Mapping[Source, int]) -> list[_Kept]:
        """Converts numbers that say which source, row and column they are."""

        def read(name: str, place: int | None) -> Tensor:
            matrix = self._reader.packed[name]
            rows, columns = torch.arange(matrix.outputs), torch.arange(matrix.inputs)
            own = (number[name, place] * PLACES + rows[:, None]) * PLACES + columns
            own = own.T if matrix.transposed else own
            return own if place is None else own[None]

        parts = self._like | self._conversion.expert(layer, 0, read, TWO)
        module = self._conversion.modules[layer]
        matrices = matrices_of(module, parts)[: 3 if module.has_gate else 2]
        kept = [_kept_rows(matrix, [*number], self._reader) for matrix in matrices]
        return [] if None in kept else [of for of in kept if of is not None]

    def __enter__(self) -> ConvertedExperts:
        return self


class _Kept(NamedTuple):
    """A matrix that is rows of a quantized one."""

    source: int
    rows: slice | NDArray[np.int64]

    def rows_in(self, whole: Part) -> Part:
        if not isinstance(whole, Codes):
            return RawTensor(whole.dtype, whole.bits[self.rows].shape, whole.bits[self.rows])
        regular = isinstance(self.rows, slice) and self.rows.step == 1 and self.rows.start % BLOCK == 0
        if whole.format == "fp8" and not regular:  # rows of a block must have one scale
            return raw_tensor(whole[self.rows].values())
        return whole[self.rows]


def _kept_rows(matrix: Tensor, sources: Sequence[Source], reader: TensorReader) -> _Kept | None:
    """Returns the rows of a matrix whose numbers say their place; None where they are not of one source."""
    first = matrix[:, 0]
    source, rows = int(first[0]) // PLACES**2, (first // PLACES % PLACES).numpy()
    whole = reader.packed[sources[source][0]]
    own = (source * PLACES + torch.from_numpy(rows)[:, None]) * PLACES + torch.arange(whole.inputs)
    if matrix.shape != own.shape or not torch.equal(matrix, own):
        return None
    step = int(rows[1] - rows[0]) if len(rows) > 1 else 1
    found = slice(int(rows[0]), int(rows[-1]) + 1, step)
    regular = step > 0 and np.array_equal(rows, np.arange(found.start, found.stop, step))
    return _Kept(source, found if regular else rows)
