"""A backbone whose matrices stay as a file has quantized them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from decoding import fp8_codes
from test_memory_needs import SMALLER

from pipeline.backbone.backbone import Backbone
from pipeline.backbone.linear import DenseLinear, Precision, QuantizedLinear
from pipeline.backbone.weights import Weights
from pipeline.checkpoint.model_source import OwnMatrix, Tensors
from pipeline.checkpoint.random_model import RandomModel
from pipeline.checkpoint.reader import RawTensor, numbers_of, together
from pipeline.config import EngineConfig
from pipeline.device.cpu import CpuDevice
from pipeline.memory.needs import needs
from pipeline.models.architecture import TensorSpec
from pipeline.models.registry import architecture_of, model_spec
from pipeline.models.shapes import SHAPES
from shm.codes import Codes, rounded
from shm.layout import FORMATS, Float32
from workers.kernels.matrix import HostMatrix

OUTPUTS, INPUTS = 48, 128


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.close()


class StoredTensors:
    """Tensors in memory, some of them as codes."""

    def __init__(self, tensors: Mapping[str, Float32 | Codes]) -> None:
        self._tensors = tensors

    def float32(self, name: str, shape: tuple[int, ...]) -> Float32:
        return numbers_of(self.stacked([(name, shape)]))

    def stacked(self, tensors: Sequence[tuple[str, tuple[int, ...]]]) -> RawTensor | Codes:
        return together([self._one(self._tensors[name]) for name, _ in tensors])

    def _one(self, tensor: Float32 | Codes) -> RawTensor | Codes:
        return tensor if isinstance(tensor, Codes) else RawTensor("F32", tensor.shape, tensor.view(np.uint32))


def stored(formats: Sequence[str], factors: Sequence[float] = (1, 1, 1)) -> dict[str, Float32 | Codes]:
    """A matrix of each format; "": numbers."""
    random = np.random.default_rng(0)
    tensors: dict[str, Float32 | Codes] = {}
    for name, format, factor in zip("abc", formats, factors, strict=False):
        w = (0.1 * random.standard_normal((OUTPUTS, INPUTS))).astype(np.float32)
        if format == "fp8":
            tensors[name] = fp8_codes(w)
        else:
            tensors[name] = rounded(w, format, factor) if format else w
    return tensors


def weights(tensors: Mapping[str, Float32 | Codes], device: CpuDevice, dtype: str = "own") -> Weights:
    own = {n: OwnMatrix(t.format, (OUTPUTS, INPUTS)) for n, t in tensors.items() if isinstance(t, Codes)}
    specs = {name: TensorSpec(name, (OUTPUTS, INPUTS), "matrix") for name in tensors}
    return Weights(specs, StoredTensors(tensors), Precision(dtype, device, None, own))


@pytest.mark.parametrize(
    ("formats", "factors", "kept"),
    [
        (["q4_0"] * 3, (1, 1, 1), "q4_0"),
        (["q8_0"], (1,), "q8_0"),
        (["mxfp4"] * 2, (1, 1), "mxfp4"),
        (["nvfp4"] * 2, (0.01, 0.01), "nvfp4"),
        (["nvfp4"] * 2, (0.01, 0.02), "int8"),
        (["q4_0", "q8_0"], (1, 1), "q8_0"),
        (["q4_0", "mxfp4"], (1, 1), "int8"),
        (["fp8"], (1,), "fp8"),
        (["fp8"] * 2, (1, 1), "int8"),  # one block of 128 rows with two scales
        (["q4_0", ""], (1, 1), ""),
    ],
)
def test_a_matrix_is_kept_in_the_format_of_its_parts(
    formats: list[str], factors: tuple[float, ...], kept: str, device: CpuDevice
) -> None:
    """And in int8 where they differ, unless one is not quantized."""
    tensors = stored(formats, factors)
    made = weights(tensors, device)
    order = {"a": np.arange(OUTPUTS)[::-1].copy()}
    linear, turned = made.linear(*tensors), made.linear(*tensors, order=order)
    w = np.concatenate([t.values() if isinstance(t, Codes) else t for t in tensors.values()])
    rows = np.random.default_rng(1).standard_normal((5, INPUTS)).astype(np.float32)
    found, wanted = linear(torch.from_numpy(rows)).numpy(), rows @ w.T
    assert np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max()
    place = np.concatenate([order["a"], np.arange(OUTPUTS, len(w))])
    np.testing.assert_array_equal(turned(torch.from_numpy(rows)).numpy(), found[:, place])
    assert made.quantized == bool(kept)
    if not kept:
        assert isinstance(linear, DenseLinear)
        return
    assert isinstance(linear, QuantizedLinear)
    assert isinstance(linear.matrix, HostMatrix)
    assert linear.matrix.bytes == FORMATS[kept].matrix_bytes(*w.shape)


def test_an_asked_for_format_is_made_from_the_numbers(device: CpuDevice) -> None:
    tensors = stored(["q8_0"])
    made = {dtype: weights(tensors, device, dtype).linear("a") for dtype in ("int4", "bf16")}
    assert isinstance(made["int4"], QuantizedLinear)
    assert made["int4"].matrix.bytes == FORMATS["int4"].matrix_bytes(OUTPUTS, INPUTS)
    assert isinstance(made["bf16"], DenseLinear)
    wanted = torch.from_numpy(tensors["a"].values()).bfloat16()
    assert torch.equal(made["bf16"].weight, wanted)


class QuantizedModel(RandomModel):
    """A model of random weights, whose matrices beside the experts are codes."""

    def __init__(self, name: str, format: str) -> None:
        super().__init__(name)
        architecture, spec = architecture_of(self.config), model_spec(self.config)
        self._specs = {tensor.name: tensor for tensor in architecture.backbone(spec, self.fused)}
        self._own = format
        self.own_matrices = {
            t.name: OwnMatrix(format, (t.shape[0], t.shape[1]))
            for t in self._specs.values()
            if t.kind != "float32" and len(t.shape) == 2
        }

    @contextmanager
    def tensors(self) -> Iterator[Tensors]:  # type: ignore[override]  # random ones are Tensors, too
        with super().tensors() as drawn:
            numbers = {name: drawn.float32(name, t.shape) for name, t in self._specs.items()}
            yield StoredTensors(
                {
                    name: rounded(w, self._own) if name in self.own_matrices else w
                    for name, w in numbers.items()
                }
            )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("format", ["q4_0", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("family", ["mixtral-8x7b", "deepseek-v2"])
def test_backbone_has_the_planned_size(
    family: str, format: str, tied: bool, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SHAPES[family]
    smaller = {key: SMALLER.get(key, value) for key, value in config.items()} | {"tie_word_embeddings": tied}
    smaller |= {"q_lora_rank": 48} if config.get("q_lora_rank") else {}
    monkeypatch.setitem(SHAPES, "smaller", smaller)
    source = QuantizedModel("shape:smaller", format)
    precision = Precision("own", device, None, source.own_matrices)
    backbone = Backbone(source, model_spec(source.config), precision, 64)
    planned = needs(source, EngineConfig(model=Path("shape:smaller"), device="cpu"), "bf16")
    assert planned.backbone_dtype == "own"
    # A line of factors each is planned, and those that are stacked share one.
    lines = 64 * len(source.own_matrices) if format == "nvfp4" else 0
    assert 0 <= planned.backbone - backbone.bytes <= lines
    assert not backbone.differentiable
