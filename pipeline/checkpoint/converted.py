"""A checkpoint of any family and layout, as transformers reads it: one expert at a time, and everything else.

transformers says how names and layouts of a checkpoint become a model's parameters: by renamings, and by
converters whose operations merge, concatenate or transpose. What becomes a parameter of an experts module is
an expert's. One expert is read by giving its converter that expert's tensors alone: those with its number, or
place e of tensors that hold all of them. So no more than a few experts are in memory, whatever the layout.

Quantized matrices (`packed.py`) are converted as the numbers that they mean. But an expert's keep their codes
where each row of gate, up or down is a row of one of them, which is found out by converting numbers that say
their own place.
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from pipeline.checkpoint.decoder import MATRICES, decoder_of, experts_used, without_memory
from pipeline.checkpoint.found_math import matrices_of
from pipeline.checkpoint.index import CheckpointIndex
from pipeline.checkpoint.packed import FP8_BLOCK
from pipeline.checkpoint.quantized import WRONG
from pipeline.checkpoint.reader import RawTensor, TensorReader, numbers_of, together
from pipeline.checkpoint.whole_experts import Part, WholeExperts
from pipeline.errors import ModelError
from pipeline.models.architecture import ExpertRows, TensorRows
from pipeline.models.config_keys import Config
from pipeline.models.facts import Headers
from shm.codes import Codes
from shm.layout import Float32

Source = tuple[str, int | None]  # a tensor, or one place of its first axis
Read = Callable[[str, int | None], Tensor]  # its numbers, of one place [1, ...]

DTYPES = {
    **{"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
    **{"U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64},
    "BOOL": torch.bool,
}
BITS = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
TWO = ("gate_up_proj", "up_proj", "down_proj")  # the parameters that have an expert's matrices
BIASES = ("gate_up_proj_bias", "up_proj_bias")
PLACES = 1 << 24  # more than a matrix has rows, or columns


@dataclass
class Place:
    """Where a checkpoint has a parameter, or those that one converter makes."""

    target: str  # the (first) parameter's name in the model
    converter: WeightConverter | None  # None: the tensor is the parameter
    keys: dict[str, list[str]] = field(
        default_factory=lambda: defaultdict(list)
    )  # by source pattern, in order

    @property
    def first(self) -> str:
        """The first of its tensors, for messages."""
        return next(iter(self.keys.values()))[0]


class Conversion:
    """How the tensors of a checkpoint become the parameters of a model."""

    def __init__(self, model: PreTrainedModel, names: Sequence[str]) -> None:
        """`model`: on the meta device; `names`: of all tensors."""
        self.model = model
        self.state: dict[str, Tensor] = model.state_dict()
        modules = experts_used(model)
        self.modules: list[Any] = [*modules.values()]
        self.names = [*modules]  # of these modules
        self.count = len(self.modules[0].down_proj)  # experts of each
        for module in self.modules:  # operations that look at a parameter's shape get one expert at a time
            for name, parameter in list(module.named_parameters(recurse=False)):
                module._parameters[name] = nn.Parameter(parameter[:1], requires_grad=False)
        self.experts: list[dict[str, Place]] = [{} for _ in modules]  # by parameter of the module
        self.backbone: dict[str, Place] = {}  # by target
        number = {name: n for n, name in enumerate(modules)}
        mapping = get_model_conversion_mapping(model)
        renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
        converters = [m for m in mapping if isinstance(m, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        for key in sorted(names, key=dot_natural_key):
            target, pattern = rename_source_key(
                key, renamings, converters, model.base_model_prefix, self.state
            )
            if target not in self.state and key in self.state:
                target, pattern = key, None
            owner, _, name = target.rpartition(".")
            of_expert = owner in number and name in MATRICES
            places = self.experts[number[owner]] if of_expert else self.backbone
            converter = None if pattern is None else by_pattern[pattern]
            place = places.setdefault(name if of_expert else target, Place(target, converter))
            place.keys[pattern or key].append(key)
        for module in self.modules:  # operations that look at a parameter's shape are given one expert
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(parameter[:1], requires_grad=False))

    def parameters(self, place: Place, read: Read) -> dict[str, Tensor]:
        """Whole parameters, by name."""
        return self._converted(
            place, {p: [read(key, None) for key in keys] for p, keys in place.keys.items()}
        )

    def expert(
        self, layer: int, expert: int, read: Read, names: Container[str] = MATRICES
    ) -> dict[str, Tensor]:
        """An expert's part of these parameters of its module, as the module has it. Raises ModelError where
        the checkpoint has another number of experts."""
        places = self.experts[layer].items()
        return {name: self._expert(place, expert, read) for name, place in places if name in names}

    def sources(self, layer: int, expert: int, names: Container[str]) -> list[Source]:
        """What `expert` reads, in that order."""
        places = [place for name, place in self.experts[layer].items() if name in names]
        return [s for place in places for each in self._sources(place, expert).values() for s in each]

    def _expert(self, place: Place, expert: int, read: Read) -> Tensor:
        sources = self._sources(place, expert)
        parts = {pattern: [read(*source) for source in each] for pattern, each in sources.items()}
        return self._converted(place, parts)[place.target][0]

    def _sources(self, place: Place, expert: int) -> dict[str, list[Source]]:
        """By source pattern."""
        # One converter may make several modules' experts: those of the first come first.
        modules = 1 if place.converter is None else len(place.converter.target_patterns)
        parts: dict[str, list[Source]] = {}
        for pattern, keys in place.keys.items():
            if len(keys) == self.count * modules:  # a tensor for each
                parts[pattern] = [(key, None) for key in keys[expert :: self.count]]
            elif len(keys) == 1:  # all in one
                parts[pattern] = [(keys[0], expert)]
            else:
                raise ModelError(f"{len(keys)} tensors like {keys[0]}, for {self.count} experts: {WRONG}")
        return parts

    def _converted(self, place: Place, parts: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        if place.converter is None:
            return {place.target: next(iter(parts.values()))[0]}
        converter = deepcopy(place.converter)
        for pattern, tensors in parts.items():
            for tensor in tensors:
                converter.add_tensor(place.target, pattern, pattern, partial(_same, tensor))
        try:
            made = converter.convert(place.target, model=self.model, config=self.model.config)
        except Exception as e:  # whatever an operation raises of tensors that do not fit
            reason = " ".join(str(e).split())[:200]
            raise ModelError(
                f"{place.first} and its like cannot be converted to {place.target}: {reason}"
            ) from None
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


def _same(tensor: Tensor) -> Tensor:
    return tensor


# --- from headers ----------------------------------------------------------------------------------------


def check_headers(model: PreTrainedModel, headers: Headers) -> str:
    """Raises ModelError, one line, where a parameter is missing or would get another shape; a line about
    tensors that are not read."""

    for name, (dtype, _) in headers.items():
        if dtype not in DTYPES:
            raise ModelError(f"the tensor {name} has the dtype {dtype}, which is not read")
    read = partial(_like, headers)
    conversion = Conversion(model, [*headers])
    unread = []
    found: dict[str, Tensor] = {}
    for place in conversion.backbone.values():
        if place.target in conversion.state:
            found |= conversion.parameters(place, read)
        else:
            unread.append(place.first)
    for layer, name in enumerate(conversion.names):
        _check_alike(conversion, layer, headers)
        for part, made in conversion.expert(layer, 0, read).items():
            found[f"{name}.{part}"] = made.expand(conversion.count, *made.shape)
    _check_found(_needed(conversion), found)
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    unread = [name for name in unread if not any(re.search(pattern, name) for pattern in ignored)]
    return (
        f"{len(unread)} tensors of the checkpoint are not read, the first is {unread[0][:120]}"
        if unread
        else ""
    )


def _check_alike(conversion: Conversion, layer: int, headers: Headers) -> None:
    """Raises ModelError unless each expert of a module has tensors like the first's."""
    for keys in (keys for place in conversion.experts[layer].values() for keys in place.keys.values()):
        for n, key in enumerate(keys):
            first = keys[n // conversion.count * conversion.count]
            if headers[key] != headers[first]:
                raise ModelError(f"the tensors {first} and {key} differ in shape or dtype: {WRONG}")


def _needed(conversion: Conversion) -> dict[str, Tensor]:
    """The parameters and stored buffers of decoder and head, but tied ones that another one gives."""
    model, names = conversion.model, {m: name for name, m in conversion.model.named_modules()}
    tops = [names[m] for m in (model.get_decoder(), model.get_output_embeddings()) if m is not None]
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    other = {name for name, m in model.named_modules() if hasattr(type(m), "_apply_gate")} - {
        *conversion.names
    }
    return {
        name: tensor
        for name, tensor in conversion.state.items()
        if any(name.startswith(f"{top}." if top else "") for top in tops)
        and name not in tied
        and name.rpartition(".")[0] not in other
    }


def _check_found(needed: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for name, like in needed.items():
        made = found.get(name)
        if made is None:
            raise ModelError(f"no tensor gives the parameter {name}: {WRONG}")
        if made.shape != like.shape:
            shapes = f"{list(made.shape)}; config.json gives {list(like.shape)}"
            raise ModelError(f"the parameter {name} would get the shape {shapes}")
        if like.is_floating_point() and made.dtype not in BITS:
            kinds = ", ".join(BITS.values())
            raise ModelError(
                f"the parameter {name} would get {made.dtype}; only {kinds} are read, where config.json has"
                " no quantization_config that says more"
            )


# --- from files ------------------------------------------------------------------------------------------


def conversion_of(config: Config, names: Sequence[str]) -> Conversion:
    """Raises ModelError."""
    return Conversion(without_memory(*decoder_of(config)), names)


class ConvertedTensors(Mapping[str, Tensor]):
    """The parameters and buffers of a model outside its routed experts, read from a checkpoint on each call,
    for any number of threads: in the checkpoint's own dtype, or in float32 where they are quantized."""

    def __init__(self, conversion: Conversion, reader: TensorReader, index: CheckpointIndex) -> None:
        self._conversion, self._reader, self._packed = conversion, reader, index.packed
        self._read = partial(_read, reader, index)
        self._places = dict(conversion.backbone)
        for place in conversion.backbone.values():
            for target in () if place.converter is None else place.converter.target_patterns[1:]:
                name = place.target.replace(place.converter.target_patterns[0], target)  # type: ignore[union-attr]
                self._places[name] = place

    def __getitem__(self, name: str) -> Tensor:
        return self._conversion.parameters(self._places[name], self._read)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def float32(self, name: str, shape: tuple[int, ...]) -> Float32:
        """As `Tensors.float32`."""
        numbers: Float32 = self._checked(name, shape).to(torch.float32).numpy()
        return numbers

    def stacked(self, tensors: Sequence[tuple[str, tuple[int, ...]]]) -> RawTensor | Codes:
        """As `Tensors.stacked`."""
        return together([self._one(name, shape) for name, shape in tensors])

    def _one(self, name: str, shape: tuple[int, ...]) -> RawTensor | Codes:
        place = self._places.get(name)
        if place is not None and place.converter is None and place.first in self._packed:
            return self._reader.stacked([(place.first, shape)])
        return raw_of(self._checked(name, shape))

    def _checked(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._places:
            raise ModelError(f"no tensor gives the parameter {name}: {WRONG}")
        tensor = self[name]
        if tuple(tensor.shape) != shape:
            raise ModelError(f"the parameter {name} has the shape {list(tensor.shape)}, not {list(shape)}")
        return tensor.contiguous()


class ConvertedExperts(WholeExperts):
    """The experts of a checkpoint, for `encode_experts`."""

    def __init__(self, conversion: Conversion, reader: TensorReader, index: CheckpointIndex) -> None:
        super().__init__(self._located, self._converted)
        self._conversion, self._reader, self._index = conversion, reader, index
        self._read = partial(_read, reader, index)
        self._like = conversion.expert(0, 0, partial(_like, index.headers))
        self._shapes = [tuple(m.shape) for m in matrices_of(conversion.modules[0], self._like)]
        self._kept: dict[Any, list[_Kept]] = {}  # what layers of one kind keep
        self._lock = threading.Lock()  # guards it

    def _located(self, layer: int, expert: int) -> ExpertRows:
        name = f"{self._conversion.names[layer]}.{expert}"
        return tuple(TensorRows(f"{name}:{n}", shape, 0, shape[0]) for n, shape in enumerate(self._shapes))

    def _converted(self, layer: int, expert: int) -> list[Part]:
        conversion = self._conversion
        sources = conversion.sources(layer, expert, TWO)
        kept = self._kept_of(layer) if all(name in self._index.packed for name, _ in sources) else []
        packed = {n: self._packed(*sources[n]) for n in {of.source for of in kept}}
        parts = self._like | conversion.expert(layer, expert, self._read, BIASES if kept else MATRICES)
        others = matrices_of(conversion.modules[layer], parts)[len(kept) :]
        return [of.rows_in(packed[of.source]) for of in kept] + [raw_of(m.contiguous()) for m in others]

    def _packed(self, name: str, place: int | None) -> Part:
        return self._reader.packed_rows(name, 0, self._index.packed[name].outputs, place)

    def _kept_of(self, layer: int) -> list[_Kept]:
        """The rows of gate, up and down, if all are rows of quantized matrices; else none."""
        sources = self._conversion.sources(layer, 0, TWO)
        places = self._conversion.experts[layer].values()
        kind = (
            *(id(place.converter) for place in places),
            *(self._index.packed[n].shape for n, _ in sources),
        )
        with self._lock:
            if kind not in self._kept:
                self._kept[kind] = self._find_kept(layer, {source: n for n, source in enumerate(sources)})
            return self._kept[kind]

    def _find_kept(self, layer: int, number: Mapping[Source, int]) -> list[_Kept]:
        """Converts numbers that say which source, row and column they are."""

        def read(name: str, place: int | None) -> Tensor:
            matrix = self._index.packed[name]
            rows, columns = torch.arange(matrix.outputs), torch.arange(matrix.inputs)
            own = (number[name, place] * PLACES + rows[:, None]) * PLACES + columns
            own = own.T if matrix.transposed else own
            return own if place is None else own[None]

        parts = self._like | self._conversion.expert(layer, 0, read, TWO)
        module = self._conversion.modules[layer]
        matrices = matrices_of(module, parts)[: 3 if module.has_gate else 2]
        kept = [_kept_rows(matrix, [*number], self._index) for matrix in matrices]
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
        regular = isinstance(self.rows, slice) and self.rows.step == 1 and self.rows.start % FP8_BLOCK == 0
        if whole.format == "fp8" and not regular:  # rows of a block must have one scale
            numbers = whole[self.rows].values()
            return RawTensor("F32", numbers.shape, numbers.view(np.uint32))
        return whole[self.rows]


def _kept_rows(matrix: Tensor, sources: Sequence[Source], index: CheckpointIndex) -> _Kept | None:
    """Of a matrix of numbers that say their place; None where its rows are no whole ones of one source."""
    first = matrix[:, 0]
    source, rows = int(first[0]) // PLACES**2, (first // PLACES % PLACES).numpy()
    whole = index.packed[sources[source][0]]
    own = (source * PLACES + torch.from_numpy(rows)[:, None]) * PLACES + torch.arange(whole.inputs)
    if matrix.shape != own.shape or not torch.equal(matrix, own):
        return None
    step = int(rows[1] - rows[0]) if len(rows) > 1 else 1
    found = slice(int(rows[0]), int(rows[-1]) + 1, step)
    regular = step > 0 and np.array_equal(rows, np.arange(found.start, found.stop, step))
    return _Kept(source, found if regular else rows)


def _read(reader: TensorReader, index: CheckpointIndex, name: str, place: int | None) -> Tensor:
    matrix = index.packed.get(name)
    if matrix is not None:
        numbers = torch.from_numpy(numbers_of(reader.packed_rows(name, 0, matrix.outputs, place)))
        numbers = numbers.T if matrix.transposed else numbers
        return numbers if place is None else numbers[None]
    entry = index.tensors[name]
    if place is None:
        return torch.from_numpy(reader.part(name)).view(DTYPES[entry.dtype]).reshape(entry.shape)
    data = reader.part(name, place, place + 1)
    return torch.from_numpy(data).view(DTYPES[entry.dtype]).reshape(1, *entry.shape[1:])


def _like(headers: Headers, name: str, place: int | None) -> Tensor:
    """What `_read` gives, without memory."""
    dtype, shape = headers[name]
    return torch.empty(shape if place is None else (1, *shape[1:]), dtype=DTYPES[dtype], device="meta")


def raw_of(tensor: Tensor) -> RawTensor:
    """The bits of a contiguous tensor of a dtype in BITS."""
    kind = torch.int32 if tensor.dtype == torch.float32 else torch.int16
    bits = tensor.view(kind).numpy()
    unsigned: Any = np.uint32 if kind == torch.int32 else np.uint16
    return RawTensor(BITS[tensor.dtype], tuple(tensor.shape), bits.view(unsigned))
