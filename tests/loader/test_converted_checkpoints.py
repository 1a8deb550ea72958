"""Checkpoints of any family and layout give each expert and each parameter bit by bit."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import packers
import pytest
import torch
from packers import Packing
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_families import FAMILIES, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.checkpoint import open as opening
from pipeline.checkpoint.converted import ConvertedTensors, check_headers, conversion_of
from pipeline.checkpoint.converted_experts import ConvertedExperts
from pipeline.checkpoint.decoder import MATRICES, decoder_of, experts_of, without_memory
from pipeline.checkpoint.index import CheckpointIndex
from pipeline.checkpoint.reader import TensorReader, numbers_of
from pipeline.errors import ModelError
from pipeline.generic.describe import describe
from pipeline.models.config_keys import Config
from pipeline.models.facts import Headers, ModelFacts, expert_shape
from pipeline.models.registry import architecture_of, model_spec
from shm.codes import Codes
from shm.layout import ExpertShape, format_named
from shm.segment import unlink
from shm.store import StoreBuilder, StoreManifest
from workers.kernels.reference import tile_numbers

# Fused, each for itself, joined, transposed, interleaved; with biases; ungated; beside other parts.
SAMPLE = ("aria", "deepseek_v3", "ernie4_5_vl_moe", "gpt_oss", "nemotron_h")
EVERY = [pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES if f not in SAMPLE]


def saved(model: PreTrainedModel, folder: Path, original: bool = False) -> Path:
    model.save_pretrained(folder, save_original_format=original)
    return folder


def checked(config: Config, headers: Headers) -> str:
    """What the child process says that checks a checkpoint's headers."""
    return check_headers(without_memory(*decoder_of(config)), headers)


def described(config: Config) -> ModelFacts:
    """What a child process says of a config."""
    return describe(without_memory(*decoder_of(config)))


def check_folder(folder: Path) -> str:
    index = CheckpointIndex.open(folder)
    return checked(index.config, index.headers)


def read_all(folder: Path) -> tuple[dict[str, Tensor], list[list[list[np.ndarray]]]]:
    """The parameters by name, and the matrices and biases of each layer's experts, float32."""
    index = CheckpointIndex.open(folder)
    headers = index.headers
    conversion = conversion_of(index.config, [*headers])
    with TensorReader(index) as reader:
        tensors = ConvertedTensors(conversion, reader, headers)
        parameters = {name: tensors[name] for name in tensors}
        with ConvertedExperts(conversion, reader, headers) as experts:
            places = [
                [experts.locate(layer, e) for e in range(conversion.count)]
                for layer in range(len(conversion.modules))
            ]
            numbers = [
                [[numbers_of(experts.rows(part, 0, part.rows)) for part in expert] for expert in layer]
                for layer in places
            ]
    return parameters, numbers


def expected_expert(module: Any, e: int) -> list[np.ndarray]:
    """Gate, up, down and biases, by the definition of each layout."""
    wide = (module.gate_up_proj if module.has_gate else module.up_proj)[e]
    down = module.down_proj[e]
    if module.is_transposed:
        wide, down = wide.T, down.T
    parts = [wide]
    if module.has_bias:
        parts.append((module.gate_up_proj_bias if module.has_gate else module.up_proj_bias)[e][None].T)
    found = []
    for part in parts:
        if not module.has_gate:
            halves = [part]
        elif module.is_concatenated:
            halves = [*part.chunk(2)]
        else:
            halves = [part[0::2], part[1::2]]
        found.append(halves)
    matrices = [*found[0], down] + [bias.T for biases in found[1:] for bias in biases]
    return [matrix.detach().float().numpy() for matrix in matrices]


def check_equal(model: PreTrainedModel, folder: Path) -> None:
    parameters, numbers = read_all(folder)
    decoder = model.get_decoder()
    modules = [module for name, module in experts_of(decoder) if "vision" not in name]
    assert len(numbers) == len(modules)
    for module, experts in zip(modules, numbers, strict=True):
        for e, matrices in enumerate(experts):
            for found, expected in zip(matrices, expected_expert(module, e), strict=True):
                np.testing.assert_array_equal(found, expected)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    names = {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items()}
    routed = {id(module) for _, module in experts_of(decoder)}
    compared = 0
    for part in (decoder, model.get_output_embeddings()):
        for owner in () if part is None else part.modules():
            own = {**owner._parameters, **owner._buffers}
            for key, tensor in own.items():
                name = names.get(id(tensor))
                if name is None or name in tied or (id(owner) in routed and key in MATRICES):
                    continue
                assert torch.equal(parameters[name].to(tensor.dtype), tensor), name
                compared += 1
    assert compared > 10


@pytest.mark.parametrize("original", [False, True], ids=["fused", "original"])
@pytest.mark.parametrize("family", [*SAMPLE, *EVERY])
def test_every_expert_and_parameter_is_the_models(family: str, original: bool, tmp_path: Path) -> None:
    model = tiny_model(family)
    check_equal(model, saved(model, tmp_path, original))
    check_folder(tmp_path)


# --- quantized -------------------------------------------------------------------------------------------

BLOCK = 32
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def in_fp8(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix in 8 bits, the scale of each block, and the numbers that both mean."""
    rows, columns = matrix.shape
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    codes, numbers = matrix.to(torch.float8_e4m3fn), torch.empty_like(matrix)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            scales[i, j] = matrix[place].abs().max() / 448
            codes[place] = (matrix[place] / scales[i, j]).to(torch.float8_e4m3fn)
            numbers[place] = codes[place].float() * scales[i, j]
    return codes, scales, numbers


def rewrite(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def tensors_in(folder: Path) -> dict[str, Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("family", ["deepseek_v3", "minimax_m2", "qwen3_next"])
def test_blocks_of_8_bits(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    tensors = tensors_in(saved(model, tmp_path, original=True))
    meant = dict(tensors)
    for name in [n for n in tensors if "proj" in n or ".w1." in n or ".w2." in n or ".w3." in n]:
        if name.endswith(".weight") and tensors[name].dim() == 2:
            tensors[name], tensors[f"{name}_scale_inv"], meant[name] = in_fp8(tensors[name])
    assert len(tensors) > len(meant) + 50
    method = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    check_equal_after(meant, model, tmp_path)
    rewrite(tmp_path, tensors, quantization_config=method)
    check_folder(tmp_path)
    check_equal(model, tmp_path)


def check_equal_after(meant: dict[str, Tensor], model: PreTrainedModel, folder: Path) -> None:
    """Give the model these numbers, by way of a checkpoint that is not quantized."""
    rewrite(folder, meant)
    loaded = type(model).from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())


def test_experts_in_mxfp4_fill_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a family of our own: the backbone's tensors come by the names of its own loader."""
    model = tiny_model("gpt_oss")
    tensors = tensors_in(saved(model, tmp_path))
    generator = torch.Generator().manual_seed(0)
    modules = dict(experts_of(model))
    for name, module in modules.items():
        for part in ("gate_up_proj", "down_proj"):
            experts, inputs, outputs = getattr(module, part).shape
            shape = experts, outputs, inputs // 32, 16
            blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
            scales = torch.randint(118, 126, shape[:-1], generator=generator, dtype=torch.uint8)
            codes = torch.stack([blocks & 15, blocks >> 4], -1).long()  # low bits first
            numbers = FP4[codes].flatten(-2) * 2.0 ** (scales[..., None].float() - 127)
            getattr(module, part).data = numbers.reshape(experts, outputs, inputs).mT.contiguous()
            tensors |= {f"{name}.{part}_blocks": blocks, f"{name}.{part}_scales": scales}
            del tensors[f"{name}.{part}"]
    rewrite(tmp_path, tensors, quantization_config={"quant_method": "mxfp4"})
    check_equal(model, tmp_path)
    monkeypatch.setattr(opening, "check_headers", checked)  # a process of its own takes seconds
    source = opening.open_model(tmp_path)
    spec = model_spec(source.config)
    state = model.state_dict()
    with source.tensors() as found:
        for spec_of in architecture_of(source.config).backbone(spec, source.fused):
            numbers = found.float32(spec_of.name, spec_of.shape)
            np.testing.assert_array_equal(numbers, state[spec_of.name].numpy())
    shape = expert_shape(source.config, 64, format_named("f32"))
    name = f"tandem-test-{os.getpid()}-converted"
    builder = StoreBuilder.create(name, StoreManifest("0" * 64, shape, "f32", source.name))
    try:
        assert source.fill(builder, lambda done: None) > 0
        for layer, module in enumerate(modules.values()):
            out = np.empty(builder.layout.expert_stride, np.uint8)
            head = np.empty(builder.layout.head_stride, np.uint8)
            for e in range(shape.experts):
                gate, up, down, *biases = expected_expert(module, e)
                builder.layout.encode_expert(gate, up, down, out, head, [bias[0] for bias in biases])
                np.testing.assert_array_equal(builder.expert(layer, e), out)
        builder.finish()
    finally:
        unlink(name)


GROUPS_OF_4_BITS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
ROUTED = re.compile(r"\.experts\.\d+\..*\.weight$")  # a matrix of one expert


def packed_up(tensors: dict[str, Tensor], packing: Packing) -> dict[str, Tensor]:
    """Quantizes the experts' matrices, and some of the backbone's; what all tensors mean."""
    meant = dict(tensors)
    packed = [name for name in tensors if ROUTED.search(name) or name.endswith("o_proj.weight")]
    assert len(packed) > 20
    for name in packed:
        parts, meant[name] = packing.pack(name.removesuffix(".weight"), tensors.pop(name))
        tensors |= parts
    return meant


@pytest.mark.parametrize("family", ["mixtral", "dots1"])  # of a family of our own, and of another
def test_experts_that_a_file_has_in_two_ways_have_no_own_format(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of its last layer are not quantized: in the others' format they would be rounded."""
    tensors = tensors_in(saved(tiny_model(family, moe_intermediate_size=96), tmp_path, original=True))
    layers = {int(name.split(".layers.")[1].split(".")[0]) for name in tensors if ROUTED.search(name)}
    plain = {name: tensors.pop(name) for name in list(tensors) if f".layers.{max(layers)}." in name}
    packing = packers.awq(32, "int4-f16-g32")
    packed_up(tensors, packing)
    rewrite(tmp_path, tensors | plain, quantization_config=packing.settings)
    monkeypatch.setattr(opening, "check_headers", checked)
    monkeypatch.setattr(opening, "facts_of", described)
    source = opening.open_model(tmp_path)
    assert (source.quantized, source.own_format) == ("AWQ int4 and plain", None)


@pytest.mark.parametrize(
    ("family", "packing", "tile", "kind"),
    [
        ("mixtral", packers.awq(32, "int4-f16-g32"), 64, "AWQ int4"),  # of families of our own
        ("minimax_m2", packers.gptq(32, "q8_0", bits=8), 32, "GPTQ int8"),
        ("glm4_moe", packers.modelopt_nvfp4(), 32, "NVFP4"),
        ("dots1", packers.gptq(64, "int4-f16", sym=False), 64, "GPTQ int4"),
        ("deepseek_v3", packers.fp8((128, 128), "fp8"), 128, "FP8"),
        ("flex_olmo", packers.fp8((128, 128), "fp8"), 128, "FP8"),
        ("glm4v_moe", packers.compressed("mxfp4-pack-quantized", "mxfp4", **GROUPS_OF_4_BITS), 64, "MXFP4"),
    ],
)
def test_experts_fill_a_store_without_loss(
    family: str, packing: Packing, tile: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = tensors_in(saved(tiny_model(family, moe_intermediate_size=96), tmp_path, original=True))
    meant = packed_up(tensors, packing)
    rewrite(tmp_path, tensors, quantization_config=packing.settings)
    monkeypatch.setattr(opening, "check_headers", checked)
    monkeypatch.setattr(opening, "facts_of", described)
    source = opening.open_model(tmp_path)
    assert (source.quantized, source.own_format) == (kind, packing.format)
    places = sorted({name.rpartition(".experts.")[0] for name in meant if ROUTED.search(name)})
    w1 = f"{places[0]}.experts.0.w1.weight" in meant
    names = ("w1", "w3", "w2") if w1 else ("gate_proj", "up_proj", "down_proj")
    intermediate = len(meant[f"{places[0]}.experts.0.{names[0]}.weight"])
    shape = ExpertShape(len(places), 8, 64, intermediate, tile)
    builder = StoreBuilder.create(
        f"tandem-test-{os.getpid()}-packed", StoreManifest("0" * 64, shape, packing.format or "f32", "m")
    )
    try:
        assert source.fill(builder, lambda done: None) > 0
        for layer, place in enumerate(places):
            for e in range(shape.experts):
                whole = torch.from_numpy(builder.expert(layer, e)[: shape.tiles * builder.layout.tile_bytes])
                tiles = whole.view(shape.tiles, -1)
                found = torch.cat([tile_numbers(builder.layout, tile) for tile in tiles], 1)
                gate, up, down = (meant[f"{place}.experts.{e}.{name}.weight"] for name in names)
                assert torch.equal(found[:, :intermediate], torch.stack((gate, up, down.T)))
                assert not found[:2, intermediate:].any()
        builder.finish()
    finally:
        unlink(f"tandem-test-{os.getpid()}-packed")


@pytest.mark.parametrize(
    ("family", "packing"),
    [
        ("dots1", packers.awq(32, "int4-f16-g32")),
        ("ernie4_5_vl_moe", packers.modelopt_nvfp4()),
        ("nemotron_h", packers.gptq(64, "int4-f16", sym=False)),
        ("flex_olmo", packers.fp8((128, 128), "fp8")),
        ("qwen3_next", packers.gptq(32, None, act=True)),
    ],
)
def test_experts_of_any_family_keep_their_codes(family: str, packing: Packing, tmp_path: Path) -> None:
    """Some matrices of the backbone are quantized, too."""
    model = tiny_model(family)
    tensors = tensors_in(saved(model, tmp_path, original=True))
    meant = packed_up(tensors, packing)
    check_equal_after(meant, model, tmp_path)
    rewrite(tmp_path, tensors, quantization_config=packing.settings)
    check_folder(tmp_path)
    check_equal(model, tmp_path)
    index = CheckpointIndex.open(tmp_path)
    conversion = conversion_of(index.config, [*index.headers])
    with TensorReader(index) as reader, ConvertedExperts(conversion, reader, index.headers) as experts:
        for layer in range(len(conversion.modules)):
            for part in experts.locate(layer, 1):
                rows = experts.rows(part, 0, part.rows)
                assert (rows.format if isinstance(rows, Codes) else None) == packing.format
    name = next(name for name in index.packed if name.endswith("o_proj.weight"))
    target = next(place.target for place in conversion.backbone.values() if place.first == name)
    with TensorReader(index) as reader:
        tensors_of = ConvertedTensors(conversion, reader, index.headers)
        output = tensors_of.stacked([(target, index.packed[name].shape)])
        assert (output.format if isinstance(output, Codes) else None) == packing.format


def test_blocks_of_8_bits_of_all_experts_in_one_tensor(tmp_path: Path) -> None:
    """The layout of transformers 5, of a family of our own."""
    model = tiny_model("deepseek_v3", moe_intermediate_size=128)
    tensors = tensors_in(saved(model, tmp_path))
    meant = dict(tensors)
    packing, names = (
        packers.fp8((128, 128), "fp8"),
        [n for n in tensors if "experts" in n and "shared" not in n],
    )
    for name in (n for n in names if tensors[n].dim() == 3):
        experts = [packing.pack("e", matrix) for matrix in tensors[name]]
        tensors[name] = torch.stack([parts["e.weight"] for parts, _ in experts])
        tensors[f"{name}_scale_inv"] = torch.stack([parts["e.weight_scale_inv"] for parts, _ in experts])
        meant[name] = torch.stack([numbers for _, numbers in experts])
    check_equal_after(meant, model, tmp_path)
    rewrite(tmp_path, tensors, quantization_config=packing.settings)
    check_folder(tmp_path)
    check_equal(model, tmp_path)


# --- what cannot be read ---------------------------------------------------------------------------------

NORM = "model.norm.weight"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({NORM: None}, f"no tensor gives the parameter {NORM}"),
        ({NORM: torch.ones(63)}, f"{NORM} would get the shape [63]; config.json gives [64]"),
        ({NORM: torch.ones(64, dtype=torch.int32)}, f"{NORM} would get torch.int32"),
        ({EXPERT: None}, "7 tensors like model.layers.1.mlp.experts.0.up_proj.weight, for 8 experts"),
        ({EXPERT: torch.ones(47, 64)}, f"0.up_proj.weight and {EXPERT} differ"),
        ({EXPERT: torch.ones(48, 64, dtype=torch.bfloat16)}, f"0.up_proj.weight and {EXPERT} differ"),
        ({f"model.layers.1.mlp.experts.{e}.up_proj.weight": None for e in range(8)}, "gate_up_proj"),
        ({f"model.layers.1.mlp.experts.{e}.down_proj.weight": None for e in range(8)}, "down_proj"),
    ],
)
def test_missing_and_misshapen_tensors_are_one_line(changes: dict, words: str, qwen: Path, tmp_path) -> None:
    tensors = tensors_in(qwen) | changes
    (tmp_path / "config.json").write_text((qwen / "config.json").read_text())
    rewrite(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(ModelError) as failure:
        check_folder(tmp_path)
    assert "\n" not in str(failure.value)
    assert words in str(failure.value)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny_model("qwen3_next"), tmp_path_factory.mktemp("qwen"), original=True)


def test_tensors_that_are_not_read_are_said(qwen: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((qwen / "config.json").read_text())
    rewrite(tmp_path, tensors_in(qwen) | {"mtp.norm.weight": torch.ones(64), "other.weight": torch.ones(3)})
    assert check_folder(tmp_path) == "1 tensors of the checkpoint are not read, the first is other.weight"
