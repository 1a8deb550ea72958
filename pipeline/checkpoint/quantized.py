"""The quantized matrices of a checkpoint, found in config.json and headers alone, and checked: every method,
setting or shape that cannot be read raises a ModelError, one line, before anything is allocated.

What a matrix is follows from its tensors' names, dtypes and shapes. The settings say what these cannot: which
method, the version of GPTQ's zeros, how many bits a word's numbers have. Lists of modules that are quantized,
or not, are not needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from pipeline.checkpoint.headers import TensorEntry
from pipeline.checkpoint.packed import Awq, Fp4, Fp8, Gptq, Packed, PackedIntegers, TransposedFp4
from pipeline.errors import ModelError
from pipeline.models.config_keys import shown
from protocol.program import one_line

Settings = Mapping[str, Any]
Tensors = Mapping[str, TensorEntry]

METHODS = ("awq", "gptq", "compressed-tensors", "modelopt", "fp8", "mxfp4")
INSTEAD = "download the original one, and Tandem quantizes it (--format int8, int4)"
COMPRESSED = (
    *("dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
WRONG = "the download is incomplete, or config.json is another model's"
MAX_NAME = 120  # characters of a tensor's name in a message
MAX_GROUP = 1 << 20
WHOLE = 128  # a multiple of it stands for a group of all inputs
FLOATS = ("F16", "BF16", "F32")
# Of activations and the KV cache, which are not quantized here, and what a matrix's shape says too.
LEFT_ASIDE = re.compile(
    r"(\.|_)(input_scale|input_zero_point|input_global_scale|activation_scale|output_scale|[qkv]_scale)$"
    r"|\.weight_shape$"
)
# Tensors beside a matrix, which may have its dtype.
BESIDE = re.compile(r"(_scales?|_scale_inv|_scale_2|_zero_point|_blocks)$")


def check_settings(path: Path, settings: Settings) -> None:
    """Raises ModelError for a quantization that is not read. `path`: of the file that has them."""
    method = settings.get("quant_method")
    if method not in METHODS:
        what = method if isinstance(method, str) else "an unknown method"
        raise ModelError(
            f"{path}: quantized by {what[:40]}: of quantized checkpoints those of {', '.join(METHODS)} are"
            f" read; {INSTEAD}"
        )
    wrong = next(_CHECKS[method](settings), None) if method in _CHECKS else None
    if wrong is not None:
        raise ModelError(f"{path}: {method} with {wrong[:200]} is not read; {INSTEAD}")


def _check_words(settings: Settings) -> Iterator[str]:
    """Yields the settings of AWQ or GPTQ that cannot be read."""
    awq = settings["quant_method"] == "awq"
    versions = ("gemm",) if awq else ("gptq", "gptq_v2")
    version = settings.get("version" if awq else "checkpoint_format") or settings.get("format") or versions[0]
    if not isinstance(version, str) or version.lower() not in versions:
        yield f"layout {shown(version)}"
    bits = settings.get("bits", settings.get("w_bit"))
    if type(bits) is not int or bits not in ((4,) if awq else (4, 8)):
        yield f"bits {shown(bits)}"
    group = settings.get("group_size", settings.get("q_group_size"))
    if not _is_group(group) and group != -1:
        yield f"group_size {shown(group)}"


def _check_compressed(settings: Settings) -> Iterator[str]:
    for part in (settings, *_groups(settings)):
        if part.get("format") not in (None, *COMPRESSED):
            yield f"format {shown(part['format'])}"
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        yield f"sparsity_config {shown(sparsity.get('format'))}"
    if settings.get("transform_config"):
        yield "transform_config: matrices that are rotated when they are used"
    for weights in _weights(settings):
        bits, group = weights.get("num_bits"), weights.get("group_size")
        if type(bits) is not int or bits not in (4, 8):
            yield f"num_bits {shown(bits)}"
        if not _is_group(group) and group not in (None, -1):
            yield f"group_size {shown(group)}"


def _check_modelopt(settings: Settings) -> Iterator[str]:
    algorithm = settings.get("quant_algo")
    if algorithm not in ("NVFP4", "FP8"):
        yield f"quant_algo {shown(algorithm)}"


def _check_fp8(settings: Settings) -> Iterator[str]:
    block = settings.get("weight_block_size")
    if block is not None and not (isinstance(block, list) and len(block) == 2 and all(map(_is_group, block))):
        yield f"weight_block_size {shown(block)}"


_CHECKS = {
    "awq": _check_words,
    "gptq": _check_words,
    "compressed-tensors": _check_compressed,
    "modelopt": _check_modelopt,
    "fp8": _check_fp8,
}


def _is_group(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAX_GROUP


def _groups(settings: Settings) -> list[Settings]:
    """The schemes of compressed-tensors."""
    groups = settings.get("config_groups")
    return [g for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []


def _weights(settings: Settings) -> list[Settings]:
    return [g["weights"] for g in _groups(settings) if isinstance(g.get("weights"), dict)]


# --- from headers -----------------------------------------------------------------------------------------


def find_packed(settings: Settings, tensors: Tensors) -> tuple[dict[str, Packed], dict[str, TensorEntry]]:
    """The quantized matrices, by the names that they have where they are not quantized, and all tensors that
    are no part of one. Raises ModelError where a tensor is missing or of another shape or dtype."""
    finder = _Finder(settings, tensors)
    packed = dict(finder.matrices())
    both = next((name for name in packed if name in tensors and name not in finder.used), None)
    if both is not None:
        raise ModelError(
            f"{tensors[both].file}: {one_line(both[:MAX_NAME])} is there twice, quantized and not"
        )
    plain = {n: e for n, e in tensors.items() if n not in finder.used and not LEFT_ASIDE.search(n)}
    return packed, plain


class _Finder:
    def __init__(self, settings: Settings, tensors: Tensors) -> None:
        self.used: set[str] = set()  # tensors that are parts of matrices
        self._settings, self._tensors = settings, tensors
        self._method: str = settings["quant_method"]

    def matrices(self) -> Iterator[tuple[str, Packed]]:
        for name, entry in self._tensors.items():
            base, _, last = name.rpartition(".")
            if last == "qweight" and self._method in ("awq", "gptq"):
                yield f"{base}.weight", self._awq(base) if self._method == "awq" else self._gptq(base)
            elif last == "weight_packed":
                words = entry.dtype == "I32"
                yield f"{base}.weight", self._integers(name) if words else self._fp4(name)
            elif name.endswith("_blocks") and self._method == "mxfp4":
                yield name.removesuffix("_blocks"), self._experts_fp4(name)
            elif entry.dtype not in KINDS or BESIDE.search(name):
                continue
            elif last == "weight" or self._scale_of(name) is not None:
                yield name, KINDS[entry.dtype](self, name)

    def _awq(self, base: str) -> Packed:
        words = self._part(f"{base}.qweight", ("I32",), dims=(2,))
        inputs, outputs = words.shape[0], words.shape[1] * 8
        group, groups = self._word_groups(inputs)
        zeros = self._part(f"{base}.qzeros", ("I32",), (groups, words.shape[1]))
        scales = self._part(f"{base}.scales", FLOATS, (groups, outputs))
        return Awq((outputs, inputs), words, scales, zeros, 4, group, usual=True)

    def _gptq(self, base: str) -> Packed:
        words = self._part(f"{base}.qweight", ("I32",), dims=(2,))
        bits, order = self._settings.get("bits", self._settings.get("w_bit")), None
        if f"{base}.g_idx" in self._tensors:  # says the inputs, and so the bits where they differ by module
            order = self._part(f"{base}.g_idx", ("I32", "I64"), dims=(1,))
            bits = words.shape[0] * 32 / order.shape[0]
            if bits not in (4, 8):
                self._refuse(
                    f"{base}.qweight", f"has {bits:.3g} bits a weight, only 4 and 8 are read; {INSTEAD}"
                )
        bits = int(bits)
        inputs, outputs = words.shape[0] * 32 // bits, words.shape[1]
        group, groups = self._word_groups(inputs)
        if outputs * bits % 32:
            self._refuse(f"{base}.qweight", f"has {outputs} outputs, which is no multiple of {32 // bits}")
        zeros = self._part(f"{base}.qzeros", ("I32",), (groups, outputs * bits // 32))
        scales = self._part(f"{base}.scales", FLOATS, (groups, outputs))
        version = self._settings.get("checkpoint_format") or self._settings.get("format") or "gptq"
        offset = 1 if version.lower() == "gptq" else 0
        mixed = bool(self._settings.get("desc_act")) and not self._settings.get("static_groups")
        usual = not mixed and (bits == 4 or self._settings.get("sym") is True)
        return Gptq((outputs, inputs), words, scales, zeros, bits, group, usual, offset, order)

    def _word_groups(self, inputs: int) -> tuple[int, int]:
        """Inputs of a group, and how many groups there are."""
        group = self._settings.get("group_size", self._settings.get("q_group_size"))
        return (_whole(inputs), 1) if group == -1 else (group, -(-inputs // group))

    def _integers(self, name: str) -> Packed:
        weight = self._part(name, ("I32", "I8"), dims=(2,))
        base, outputs = name.removesuffix("_packed"), weight.shape[0]
        scale = self._part(f"{base}_scale", FLOATS, dims=(0, 1, 2))
        bits, group = 8, None
        if weight.dtype == "I32":
            bits, group = self._bits_of(name, weight.shape[1], scale)
        inputs = weight.shape[1] * (32 // bits if weight.dtype == "I32" else 1)
        group = group or self._group_of(f"{base}_scale", inputs, scale)
        if group is None or (math.prod(scale.shape) > 1 and scale.shape[0] != outputs):
            self._refuse(f"{base}_scale", f"does not fit {outputs} x {inputs} weights")
        if f"{base}_g_idx" in self._tensors:
            self._refuse(f"{base}_g_idx", f"gives inputs another order, which is not read; {INSTEAD}")
        zeros = None
        if f"{base}_zero_point" in self._tensors:
            if weight.dtype == "I8":
                zeros = self._part(f"{base}_zero_point", ("I8",), scale.shape)
            else:
                shape = -(-outputs * bits // 32), scale.shape[-1] if len(scale.shape) == 2 else 1
                zeros = self._part(f"{base}_zero_point", ("I32",), shape)
        usual = (bits == 4 or zeros is None) and scale.dtype != "F32"
        return PackedIntegers((outputs, inputs), weight, scale, zeros, bits, group, usual)

    def _bits_of(self, name: str, words: int, scale: TensorEntry) -> tuple[int, int]:
        """The bits of a word's numbers, and the inputs of a group: those of the one scheme that fits."""
        fitting = set()
        for weights in _weights(self._settings):
            bits = weights["num_bits"]
            group = self._group_of(name, words * 32 // bits, scale, weights.get("group_size"))
            if group is not None:
                fitting.add((bits, group))
        if len(fitting) != 1:
            self._refuse(name, f"fits {len(fitting)} of the config_groups of config.json")
        return fitting.pop()

    def _group_of(self, name: str, inputs: int, scale: TensorEntry, group: int | None = None) -> int | None:
        """The inputs of a group, of `group` or what the schemes give or what divides them; None where there
        is none."""
        groups = scale.shape[-1] if len(scale.shape) == 2 else 1
        if groups == 1:
            return _whole(inputs) if group in (None, -1) or group >= inputs else None
        sizes = [group] if group else [w.get("group_size") for w in _weights(self._settings)]
        return next((g for g in sizes if g and g > 0 and -(-inputs // g) == groups), None)

    def _fp8(self, name: str) -> Packed:
        entry = self._tensors[name]
        codes = self._part(name, ("F8_E4M3",), dims=(2,) if name.endswith(".weight") else (2, 3))
        found = self._scale_of(name)
        if found is None:
            self._missing(f"{name}_scale_inv" if self._method == "fp8" else f"{name}_scale")
        scale = self._part(found, (*FLOATS, "U8", "F8_E8M0"), dims=(0, 1, 2, 3))
        outputs, inputs = codes.shape[-2:]
        leading, grid = codes.shape[:-2], scale.shape[len(codes.shape) - 2 :]
        if not leading and len(scale.shape) < 2:  # one scale, or one for each output
            grid = (scale.shape[0] if scale.shape else 1, 1)
        blocks = self._settings.get("weight_block_size"), *self._structures()
        steps = [
            _step(size, count, [b[axis] for b in blocks if b])
            for axis, (size, count) in enumerate(zip((outputs, inputs), grid, strict=False))
        ]
        if len(grid) != 2 or scale.shape[: len(leading)] != leading or None in steps:
            self._refuse(
                found, f"has the shape {list(scale.shape)}, which does not fit {list(entry.shape)} weights"
            )
        return Fp8(codes.shape, codes, scale, (steps[0] or 1, steps[1] or 1))

    def _structures(self) -> Iterator[list[int]]:
        """The blocks of the schemes of compressed-tensors."""
        for weights in _weights(self._settings):
            block, group = weights.get("block_structure"), weights.get("group_size")
            if isinstance(block, list) and len(block) == 2 and all(map(_is_group, block)):
                yield block
            elif group is not None and _is_group(group):
                yield [1, group]

    def _fp4(self, name: str) -> Packed:
        stored = self._part(name, ("U8",), dims=(2,))
        base, (outputs, inputs) = name.removesuffix("_packed"), (stored.shape[0], 2 * stored.shape[1])
        if self._part(f"{base}_scale", ("U8", "F8_E8M0", "F8_E4M3"), dims=(2,)).dtype != "F8_E4M3":
            scale = self._part(f"{base}_scale", ("U8", "F8_E8M0"), (outputs, -(-inputs // 32)))
            return Fp4((outputs, inputs), stored, scale, None, inverse=False)
        scale = self._part(f"{base}_scale", ("F8_E4M3",), (outputs, -(-inputs // 16)))
        inverse = base != name
        whole = f"{base}_global_scale" if inverse else f"{base}_scale_2"
        factor = self._part(whole, ("F32",), dims=(0, 1))
        if math.prod(factor.shape) != 1:
            self._refuse(whole, f"has the shape {list(factor.shape)}, not one number")
        return Fp4((outputs, inputs), stored, scale, factor, inverse)

    def _experts_fp4(self, name: str) -> Packed:
        """gpt-oss has the matrices of all experts in one tensor, transposed where they are not quantized."""
        stored = self._part(name, ("U8",), dims=(4,))
        experts, outputs, groups, half = stored.shape
        if half != 16:
            self._refuse(name, f"has the shape {list(stored.shape)}; its last size is 16, for 32 inputs")
        scale = self._part(name.removesuffix("_blocks") + "_scales", ("U8",), (experts, outputs, groups))
        return TransposedFp4((experts, groups * 32, outputs), stored, scale, None, inverse=False)

    def _scale_of(self, name: str) -> str | None:
        return next((s for s in (f"{name}_scale_inv", f"{name}_scale") if s in self._tensors), None)

    def _part(
        self,
        name: str,
        dtypes: tuple[str, ...],
        shape: tuple[int, ...] | None = None,
        dims: tuple[int, ...] = (),
    ) -> TensorEntry:
        """A part of a matrix: a tensor of one of these dtypes and this shape, or number of dimensions."""
        entry = self._tensors.get(name)
        if entry is None:
            self._missing(name)
        fits = len(entry.shape) in dims if shape is None else entry.shape == shape
        if not fits or entry.dtype not in dtypes or 0 in entry.shape:
            wanted = f"{' or '.join(map(str, dims))} dimensions" if shape is None else list(shape)
            self._refuse(name, f"is {entry.dtype} {list(entry.shape)}, not {' or '.join(dtypes)} {wanted}")
        self.used.add(name)
        return entry

    def _missing(self, name: str) -> NoReturn:
        first = next(iter(self._tensors.values()))
        raise ModelError(
            f"{first.file.parent} lacks the tensor {one_line(name[:MAX_NAME])} of a quantized matrix: {WRONG}"
        )

    def _refuse(self, name: str, why: str) -> NoReturn:
        raise ModelError(f"{self._tensors[name].file}: the tensor {one_line(name[:MAX_NAME])} {why}")


def _whole(inputs: int) -> int:
    """A group of all inputs, as a multiple of those of native formats."""
    return -(-inputs // WHOLE) * WHOLE


def _step(size: int, count: int, blocks: list[int]) -> int | None:
    """Numbers that share a scale, of `size` ones with `count` scales; None where there is no such."""
    if count == 1:
        return size
    fitting = (block for block in (1, *blocks) if -(-size // block) == count)
    divided = size // count if count > 0 and size % count == 0 else None
    return next(fitting, divided)


# Of weights that have their scale beside them, by dtype.
KINDS = {"F8_E4M3": _Finder._fp8, "I8": _Finder._integers, "U8": _Finder._fp4}
