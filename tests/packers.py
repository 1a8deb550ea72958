"""Packs matrices as quantized checkpoints have them, written out from the formats' definitions, a number at a
time where that is the definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from torch import Tensor

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Tensors = dict[str, Tensor]


class Packing(NamedTuple):
    """A way to write a matrix."""

    settings: dict[str, Any]  # of the quantization
    pack: Callable[[str, Tensor], tuple[Tensors, Tensor]]  # base name, numbers -> tensors, what they mean
    format: str | None  # the native format that keeps it


def _generator(numbers: Tensor) -> torch.Generator:
    return torch.Generator().manual_seed(int(numbers.abs().sum() * 1000) % 2**31)


def _words(codes: Tensor, bits: int) -> Tensor:
    """Rows [n, k] to words [n, k * bits / 32], the first number in the low bits."""
    each = 32 // bits
    words = np.zeros((codes.shape[0], codes.shape[1] // each), np.uint64)
    for place in range(each):
        words |= codes[:, place::each].numpy().astype(np.uint64) << np.uint64(place * bits)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def _integers(numbers: Tensor, bits: int, group: int, low: int, high: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K], scales binary16 and zeros [groups, N], in low..high, of these numbers [N, K]."""
    outputs, inputs = numbers.shape
    size = inputs if group == -1 else group
    groups = -(-inputs // size)
    zeros = torch.randint(low, high + 1, (groups, outputs), generator=_generator(numbers))
    of_group = torch.arange(inputs) // size
    largest = torch.stack([numbers[:, of_group == g].abs().amax(1) for g in range(groups)])
    scales = (largest / 2 ** (bits - 1)).to(torch.float16)
    codes = (numbers / scales[of_group].T + zeros[of_group].T).round().clamp(0, 2**bits - 1)
    return codes.int(), scales, zeros


def awq(group: int, format: str | None) -> Packing:
    def pack(base: str, numbers: Tensor) -> tuple[Tensors, Tensor]:
        codes, scales, zeros = _integers(numbers, 4, group, 0, 15)
        meant = _meant(codes, scales, zeros, _groups_of(numbers, group))

        def ordered(rows: Tensor) -> Tensor:
            return _words(rows.reshape(len(rows), -1, 8)[..., AWQ_ORDER].reshape(len(rows), -1), 4)

        return {
            f"{base}.qweight": ordered(codes.T),
            f"{base}.qzeros": ordered(zeros),
            f"{base}.scales": scales,
        }, meant

    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Packing(settings, pack, format)


def gptq(
    group: int, format: str | None, bits: int = 4, version: str = "gptq", sym: bool = True, act: bool = False
) -> Packing:
    less = 1 if version == "gptq" else 0

    def pack(base: str, numbers: Tensor) -> tuple[Tensors, Tensor]:
        middle = 2 ** (bits - 1)
        bounds = (middle, middle) if sym else (less, 2**bits - 1 + less)
        codes, scales, zeros = _integers(numbers, bits, group, *bounds)
        of_group = _groups_of(numbers, group)
        if act:
            of_group = of_group[torch.randperm(len(of_group), generator=_generator(numbers))]
        return {
            f"{base}.qweight": _words(codes, bits).T.contiguous(),
            f"{base}.qzeros": _words(zeros - less, bits),
            f"{base}.scales": scales,
            f"{base}.g_idx": of_group.int(),
        }, _meant(codes, scales, zeros, of_group)

    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act, "sym": sym}
    return Packing(settings | {"checkpoint_format": version}, pack, format)


def _groups_of(numbers: Tensor, group: int) -> Tensor:
    inputs = torch.arange(numbers.shape[1])
    return inputs // (numbers.shape[1] if group == -1 else group)


def _meant(codes: Tensor, scales: Tensor, zeros: Tensor, of_group: Tensor) -> Tensor:
    return (scales.float()[of_group].T * (codes - zeros[of_group].T).float()).contiguous()


def compressed(format: str, native: str | None, scale: torch.dtype = torch.bfloat16, **args: Any) -> Packing:
    """By the compressor of compressed-tensors. Its numbers are computed with the stored scales in float32."""
    weights = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry(format)

    def pack(base: str, numbers: Tensor) -> tuple[Tensors, Tensor]:
        state = {"weight": numbers, **_scales(numbers, weights, scale)}
        packed = compressor.compress(dict(state), scheme)
        if format == "nvfp4-pack-quantized":  # whose decompressor computes in bfloat16
            codes = unpack_fp4_from_uint8(packed["weight_packed"], *numbers.shape, torch.float32)
            scales = packed["weight_scale"].float(), packed["weight_global_scale"]
            meant = dequantize(codes, scales[0], args=weights, global_scale=scales[1], dtype=torch.float32)
        else:
            meant = compressor.decompress(dict(packed), scheme)["weight"].float()
        stored = packed["weight_scale"]
        if stored.dtype == torch.float32:
            packed["weight_scale"] = stored.to(scale)
        if (shape := packed.get("weight_shape")) is not None:
            packed["weight_shape"] = shape.to(torch.int64)
        return {f"{base}.{name}": tensor.contiguous() for name, tensor in packed.items()}, meant

    group = {"weights": weights.model_dump(mode="json"), "targets": ["Linear"], "format": format}
    settings = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}
    return Packing(settings, pack, native)


def _scales(numbers: Tensor, weights: QuantizationArgs, kept: torch.dtype) -> Tensors:
    """Scales, and zeros, as a quantizer may find them: in float32, with the numbers of `kept`."""
    outputs, inputs = numbers.shape
    strategy, group = str(weights.strategy), weights.group_size
    high = {(4, "int"): 8.0, (8, "int"): 128.0, (4, "float"): 6.0, (8, "float"): 448.0}
    high_of = high[weights.num_bits, str(weights.type)]
    if strategy in ("group", "tensor_group"):
        largest = numbers.reshape(outputs, -1, group).abs().amax(-1)
    elif strategy == "channel":
        largest = numbers.abs().amax(1, keepdim=True)
    elif strategy == "block":
        rows, columns = weights.block_structure
        padded = torch.zeros(-(-outputs // rows) * rows, -(-inputs // columns) * columns)
        padded[:outputs, :inputs] = numbers
        largest = padded.reshape(len(padded) // rows, rows, -1, columns).abs().amax((1, 3))
    else:
        largest = numbers.abs().amax().reshape(1)
    scales = largest / high_of
    if strategy == "tensor_group":  # NVFP4
        whole = torch.tensor([448 * 6.0]) / numbers.abs().amax()
        scales = (scales * whole).to(torch.float8_e4m3fn).float()
        return {"weight_scale": scales, "weight_global_scale": whole}
    if str(weights.type) == "float" and group == 32:  # MXFP4 and MXFP8: powers of two
        return {"weight_scale": 2.0 ** scales.log2().ceil()}
    found = {"weight_scale": scales.to(kept).float()}
    if weights.symmetric:
        return found
    zeros = torch.randint(-(2 ** (weights.num_bits - 1)), 4, scales.shape, generator=_generator(numbers))
    return found | {"weight_zero_point": zeros.to(torch.int8)}


def modelopt_nvfp4() -> Packing:
    def pack(base: str, numbers: Tensor) -> tuple[Tensors, Tensor]:
        factor = numbers.abs().amax() / (448 * 6)
        groups = numbers.reshape(len(numbers), -1, 16)
        scales = (groups.abs().amax(-1) / 6 / factor).to(torch.float8_e4m3fn)
        each = scales.float() * factor
        codes = (groups[..., None] / each[..., None, None] - E2M1).abs().argmin(-1)
        stored = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(len(numbers), -1)
        return {
            f"{base}.weight": stored.to(torch.uint8),
            f"{base}.weight_scale": scales,
            f"{base}.weight_scale_2": factor,
            f"{base}.input_scale": torch.tensor(0.5),
        }, (E2M1[codes] * each[..., None]).reshape(numbers.shape)

    return Packing({"quant_method": "modelopt", "quant_algo": "NVFP4"}, pack, "nvfp4")


def fp8(block: tuple[int, int] | None, format: str | None, scale: torch.dtype = torch.float32) -> Packing:
    """As transformers' `fp8`: a scale for each block, or one for the matrix."""

    def pack(base: str, numbers: Tensor) -> tuple[Tensors, Tensor]:
        rows, columns = block or numbers.shape
        grid = -(-numbers.shape[0] // rows), -(-numbers.shape[1] // columns)
        padded = torch.zeros(grid[0] * rows, grid[1] * columns)
        padded[: numbers.shape[0], : numbers.shape[1]] = numbers
        largest = padded.reshape(grid[0], rows, grid[1], columns).abs().amax((1, 3))
        scales = (largest / 448).to(scale)
        each = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        each = each[: numbers.shape[0], : numbers.shape[1]]
        codes = (numbers / each).to(torch.float8_e4m3fn)
        stored = scales if block else scales[0, 0]
        return {f"{base}.weight": codes, f"{base}.weight_scale_inv": stored}, codes.float() * each

    settings = {"quant_method": "fp8", "weight_block_size": block and list(block)}
    return Packing(settings, pack, format)
