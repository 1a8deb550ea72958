"""A checkpoint of any family and layout, as transformers reads it: one expert at a time, and everything else.

transformers says how names and layouts of a checkpoint become a model's parameters: by renamings, and by
converters whose operations merge, concatenate or transpose. What becomes a parameter of an experts module is
an expert's. One expert is read by giving its converter that expert's tensors alone: those with its number, or
place e of tensors that hold all of them. So no more than a few experts are in memory, whatever the layout.

Quantized matrices (`packed.py`) are converted as the numbers that they mean, but see `converted_experts.py`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from pipeline.checkpoint.decoder import MATRICES, decoder_of, experts_used, without_memory
from pipeline.checkpoint.quantized import WRONG
from pipeline.checkpoint.reader import RawTensor, TensorReader, numbers_of, together
from pipeline.checkpoint.tables import DiskTable, Parameters
from pipeline.errors import ModelError
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


@dataclass
class Place:
    """The place in a checkpoint of a parameter, or of those that one converter makes."""

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
        """Returns the tensors that `expert` reads, in that order."""
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
    read = partial(like_tensor, headers)
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


class ConvertedTensors(Parameters):
    """Parameters that are read from a checkpoint on each call, for any number of threads: in the checkpoint's
    own dtype, or in float32 where they are quantized."""

    def __init__(self, conversion: Conversion, reader: TensorReader, headers: Headers) -> None:
        self._conversion, self._reader, self._headers = conversion, reader, headers
        self._read = partial(read_tensor, reader, headers)
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

    def table(self, name: str, shape: tuple[int, ...]) -> DiskTable:
        """Implements `Parameters.table`: of one tensor, or of several that are stacked by rows."""
        place = self._place(name)
        keys = [key for keys in place.keys.values() for key in keys]
        tensors = {key: self._headers[key][1] for key in keys}
        found = (sum(rows for rows, *_ in tensors.values()), *tensors[keys[0]][1:])
        if not _stacks(place) or found != shape or len({each[1:] for each in tensors.values()}) > 1:
            raise ModelError(f"{name} cannot be read by rows from tensors like {place.first}: {WRONG}")
        return DiskTable(self._reader, tensors)

    def float32(self, name: str, shape: tuple[int, ...]) -> Float32:
        """Implements `Tensors.float32`."""
        numbers: Float32 = self._checked(name, shape).to(torch.float32).numpy()
        return numbers

    def stacked(self, tensors: Sequence[tuple[str, tuple[int, ...]]]) -> RawTensor | Codes:
        """Implements `Tensors.stacked`."""
        return together([self._one(name, shape) for name, shape in tensors])

    def _one(self, name: str, shape: tuple[int, ...]) -> RawTensor | Codes:
        place = self._places.get(name)
        if place is not None and place.converter is None and place.first in self._reader.packed:
            return self._reader.stacked([(place.first, shape)])
        return raw_of(self._checked(name, shape))

    def _place(self, name: str) -> Place:
        if name not in self._places:
            raise ModelError(f"no tensor gives the parameter {name}: {WRONG}")
        return self._places[name]

    def _checked(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self._place(name)
        tensor = self[name]
        if tuple(tensor.shape) != shape:
            raise ModelError(f"the parameter {name} has the shape {list(tensor.shape)}, not {list(shape)}")
        return tensor.contiguous()


def _stacks(place: Place) -> bool:
    """Returns whether a parameter is a tensor, or all of its tensors by rows, in order."""
    if place.converter is None:
        return True
    steps = place.converter.operations
    stacked = len(steps) == 1 and isinstance(steps[0], Concatenate) and steps[0].dim == 0
    return stacked and len(place.keys) == 1


def read_tensor(reader: TensorReader, headers: Headers, name: str, place: int | None) -> Tensor:
    """Implements `Read`."""
    matrix = reader.packed.get(name)
    if matrix is not None:
        numbers = torch.from_numpy(numbers_of(reader.packed_rows(name, 0, matrix.outputs, place)))
        numbers = numbers.T if matrix.transposed else numbers
        return numbers if place is None else numbers[None]
    dtype, shape = headers[name]
    if place is None:
        return torch.from_numpy(reader.part(name)).view(DTYPES[dtype]).reshape(shape)
    data = reader.part(name, place, place + 1)
    return torch.from_numpy(data).view(DTYPES[dtype]).reshape(1, *shape[1:])


def like_tensor(headers: Headers, name: str, place: int | None) -> Tensor:
    """Returns a tensor like that of `read_tensor`, without memory."""
    dtype, shape = headers[name]
    return torch.empty(shape if place is None else (1, *shape[1:]), dtype=DTYPES[dtype], device="meta")


def raw_of(tensor: Tensor) -> RawTensor:
    """The bits of a contiguous tensor of a dtype in BITS."""
    kind = torch.int32 if tensor.dtype == torch.float32 else torch.int16
    bits = tensor.view(kind).numpy()
    unsigned: Any = np.uint32 if kind == torch.int32 else np.uint16
    return RawTensor(BITS[tensor.dtype], tuple(tensor.shape), bits.view(unsigned))
