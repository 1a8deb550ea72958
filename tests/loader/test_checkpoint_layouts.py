"""The same weights give the same store in every layout, dtype and number of shards."""

import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
import tiny_checkpoint
import torch
from decoding import fp8_codes
from filled_store import Enough, Stop, filled, layout_of, new_store

from pipeline.checkpoint import encode
from pipeline.checkpoint.open import Checkpoint
from pipeline.checkpoint.reader import RawTensor
from pipeline.models.architecture import TensorRows
from pipeline.models.registry import model_spec
from shm.codes import CODE_FORMATS, IN_Q8_0, Codes, rounded
from shm.expert_math import ExpertMath, Relu2
from shm.layout import FORMATS, ExpertShape, StoreLayout, format_named
from workers.kernels.reference import tile_numbers

# Odd sizes: padded in both directions, with tiles of 64 and more channels.
MIXTRAL = tiny_checkpoint.config() | {"hidden_size": 72, "intermediate_size": 164, "head_dim": 16}
OTHERS = {
    "hidden_act": "silu",
    "hidden_size": 72,
    "intermediate_size": 48,
    "moe_intermediate_size": 164,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "vocab_size": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}
QWEN2 = OTHERS | {
    "model_type": "qwen2_moe",
    "shared_expert_intermediate_size": 40,
    "num_hidden_layers": 4,
    "decoder_sparse_step": 2,
    "num_experts": 3,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
DEEPSEEK = OTHERS | {
    "model_type": "deepseek_v2",
    "n_routed_experts": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "topk_method": "greedy",
}
GPT_OSS = OTHERS | {
    "model_type": "gpt_oss",
    "intermediate_size": 164,
    "num_local_experts": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 16,
}
FAMILIES = {"mixtral": MIXTRAL, "qwen2_moe": QWEN2, "deepseek_v2": DEEPSEEK}


def numbers(config: dict) -> np.ndarray:
    """Random experts [layer, expert, gate | up | down transposed, I, H], float32, exact in every dtype."""
    spec = model_spec(config)
    shape = (len(spec.moe_layers), spec.experts, 3, spec.intermediate, spec.hidden)
    drawn = np.random.default_rng(7).standard_normal(shape, dtype=np.float32)
    drawn[np.abs(drawn) < 1e-3] = 0  # float16 would cut their last bits
    return torch.from_numpy(drawn).bfloat16().float().numpy()


def expert_tensors(config: dict, fused: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The names are written out, because the layouts are defined by transformers."""
    tensors = {}
    for layer, experts in zip(model_spec(config).moe_layers, numbers(config), strict=True):
        gate, up, down = (torch.from_numpy(experts[:, m]).to(dtype) for m in range(3))
        down = down.transpose(1, 2).contiguous()
        if fused:
            at = f"model.layers.{layer}.mlp.experts"
            tensors[f"{at}.gate_up_proj"] = torch.cat((gate, up), dim=1)
            tensors[f"{at}.down_proj"] = down.contiguous()
            continue
        mixtral = config["model_type"] == "mixtral"
        moe, names = "mlp", ("gate_proj", "up_proj", "down_proj")
        if mixtral:
            moe, names = "block_sparse_moe", ("w1", "w3", "w2")
        for expert in range(len(gate)):
            for name, matrices in zip(names, (gate, up, down), strict=True):
                at = f"model.layers.{layer}.{moe}.experts.{expert}.{name}.weight"
                tensors[at] = matrices[expert].clone()
    return tensors


def expected(config: dict, layout: StoreLayout) -> bytes:
    """The store of these experts, by `StoreLayout.encode_expert`."""
    store = np.full((layout.shape.layers, layout.layer_stride), 255, np.uint8)
    for layer, experts in zip(store, numbers(config), strict=True):
        each = len(experts)
        heads = layer[: each * layout.head_stride].reshape(each, -1)
        tiles = layer[each * layout.head_stride :].reshape(each, -1)
        for (gate, up, down), out, head in zip(experts, tiles, heads, strict=True):
            layout.encode_expert(gate, up, down.T, out, head)
    return store.tobytes()


def store_bytes(model: Checkpoint, format_name: str) -> bytes:
    with filled(model, format_name, []) as data:
        return data.tobytes()


@pytest.mark.parametrize(
    ("family", "format_name"),
    [*product(["mixtral"], FORMATS), *product(["qwen2_moe", "deepseek_v2"], ["bf16", "int4", "floe-int4"])],
)
@pytest.mark.parametrize("fused", [False, True], ids=["each", "fused"])
def test_both_layouts_give_the_store_of_its_definition(tmp_path, family, format_name, fused):
    config = FAMILIES[family]
    tensors = expert_tensors(config, fused, torch.bfloat16)
    tiny_checkpoint.write(tmp_path, tensors, shards=2, settings=config, fused=fused)
    model = Checkpoint(tmp_path)
    assert model.fused == fused
    assert store_bytes(model, format_name) == expected(config, layout_of(config, format_name))


@pytest.mark.parametrize(
    ("format_name", "dtype"),
    [*product(FORMATS, [torch.bfloat16]), *product(["bf16", "f32", "int4"], [torch.float32])],
)
def test_transposed_experts_with_alternating_columns(tmp_path, format_name, dtype, monkeypatch):
    """They and their biases give the store of its definition, and two of them at most are held at a time."""
    experts = numbers(GPT_OSS)
    biases = experts[:, :, :2, :, 0].copy()  # [layer, expert, gate | up, I]
    tensors = {}
    for layer, (matrices, of_layer) in enumerate(zip(experts, biases, strict=True)):
        at = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (torch.from_numpy(matrices[:, m]).to(dtype) for m in range(3))
        both = torch.stack((gate.transpose(1, 2), up.transpose(1, 2)), dim=3)  # [E, H, I, 2]
        tensors[f"{at}.gate_up_proj"] = both.flatten(2)
        tensors[f"{at}.down_proj"] = down.contiguous()
        of_both = torch.from_numpy(of_layer).to(dtype).transpose(1, 2)  # [E, I, 2]
        tensors[f"{at}.gate_up_proj_bias"] = of_both.flatten(1)
    tiny_checkpoint.write(tmp_path, tensors, shards=2, settings=GPT_OSS)
    layout = layout_of(GPT_OSS, format_name)
    store = np.full((layout.shape.layers, layout.layer_stride), 255, np.uint8)
    for layer, matrices, of_layer in zip(store, experts, biases, strict=True):
        heads = layer[: 3 * layout.head_stride].reshape(3, -1)
        tiles = layer[3 * layout.head_stride :].reshape(3, -1)
        for (gate, up, down), of_expert, out, head in zip(matrices, of_layer, tiles, heads, strict=True):
            layout.encode_expert(gate, up, down.T, out, head, of_expert)

    held: list[weakref.ref] = []
    most = 0

    class Counted(encode.Transposed):
        def __init__(self, *arguments):
            nonlocal most
            super().__init__(*arguments)
            held.append(weakref.ref(self))
            most = max(most, sum(one() is not None for one in held))

    monkeypatch.setattr(encode, "Transposed", Counted)
    monkeypatch.setattr(encode, "CHUNK_NUMBERS", 1000)
    monkeypatch.setattr(encode, "READ_AHEAD_BYTES", 0)
    assert store_bytes(Checkpoint(tmp_path), format_name) == store.tobytes()
    assert len(held) == 6
    assert most <= 2


@pytest.mark.parametrize("format_name", ["bf16", "f32", "int8", "floe-int4"])
def test_chunk_size_does_not_change_the_bytes(tmp_path, format_name, monkeypatch):
    monkeypatch.setattr(encode, "CHUNK_NUMBERS", 1000)  # 16 rows, or 13 channels
    monkeypatch.setattr(encode, "STRIP", 5)
    monkeypatch.setattr(encode, "TRANSPOSED_ROWS", 7)
    monkeypatch.setattr(encode, "READ_AHEAD_BYTES", 0)
    tiny_checkpoint.write(tmp_path, expert_tensors(MIXTRAL, True, torch.bfloat16), 1, MIXTRAL, fused=True)
    progress: list[int] = []
    begun: list[int] = []  # the progress when each expert was begun

    divide = encode.expert_chunks

    def expert_chunks(*arguments):
        begun.append(max(progress, default=0))
        return divide(*arguments)

    monkeypatch.setattr(encode, "expert_chunks", expert_chunks)
    layout = layout_of(MIXTRAL, format_name)
    with filled(Checkpoint(tmp_path), format_name, progress) as data:
        assert data.tobytes() == expected(MIXTRAL, layout)
    stride = layout.expert_stride + layout.head_stride
    assert begun == [max(0, n - 1) * stride for n in range(len(begun))]
    assert progress == sorted(progress)
    assert progress[-1] == layout.total_bytes
    assert len(progress) > 5 * layout.shape.layers * layout.shape.experts


def test_tensors_may_have_different_dtypes(tmp_path):
    tensors = expert_tensors(MIXTRAL, False, torch.bfloat16)
    others = (torch.float32, torch.bfloat16, torch.float16)
    mixed = {name: tensor.to(others[n % 3]) for n, (name, tensor) in enumerate(tensors.items())}
    tiny_checkpoint.write(tmp_path, mixed, settings=MIXTRAL)
    for format_name in ("bf16", "int8"):
        assert store_bytes(Checkpoint(tmp_path), format_name) == expected(
            MIXTRAL, layout_of(MIXTRAL, format_name)
        )


def test_fill_reads_the_experts_only(tmp_path):
    tensors = expert_tensors(QWEN2, True, torch.bfloat16)
    tiny_checkpoint.write(tmp_path, tensors, settings=QWEN2, fused=True)
    model = Checkpoint(tmp_path)
    builder = new_store(model, layout_of(QWEN2, "int4"))
    try:
        assert model.fill(builder, lambda done: None) == sum(t.nbytes for t in tensors.values())
    finally:
        builder.discard()


def test_exception_of_progress_ends_fill(tmp_path):
    tiny_checkpoint.write(tmp_path, expert_tensors(MIXTRAL, False, torch.bfloat16), settings=MIXTRAL)
    for format_name in ("bf16", "int4", "floe"):
        with pytest.raises(Enough), filled(Checkpoint(tmp_path), format_name, Stop()):
            pass


class Arrays:
    """Tensors in memory, by name."""

    def __init__(self, tensors: dict[str, np.ndarray | Codes]) -> None:
        self._tensors = tensors

    def rows(self, part: TensorRows, lo: int, hi: int) -> RawTensor | Codes:
        tensor = self._tensors[part.name]
        if isinstance(tensor, Codes):
            return tensor.rows(part.first + lo, part.first + hi)
        numbers = tensor.reshape(-1, part.shape[-1])[part.first + lo : part.first + hi]
        return RawTensor("F32", numbers.shape, numbers.copy().view(np.uint32))


KINDS = (ExpertMath(bias=True), ExpertMath(Relu2()), ExpertMath(Relu2(), True))


@pytest.mark.parametrize(
    ("format_name", "math"),
    [(name, math) for name in FORMATS for math in KINDS if math.gated or not name.startswith("floe")],
)
def test_experts_with_biases_or_without_a_gate_are_encoded_as_the_layout_says(format_name, math, monkeypatch):
    monkeypatch.setattr(encode, "CHUNK_NUMBERS", 3000)
    random, form = np.random.default_rng(3), format_named(format_name)
    shape = ExpertShape(1, 1, 72, 164, max(64, form.granularity), math)
    layout = StoreLayout(shape, form)
    sizes = [(164, 72)] * (math.matrices - 1) + [(72, 164)] + [(1, 164)] * math.biases
    arrays = {str(n): random.standard_normal(size).astype(np.float32) for n, size in enumerate(sizes)}
    where = tuple(TensorRows(name, w.shape, 0, len(w)) for name, w in arrays.items())
    found, wanted = (
        (np.full(layout.expert_stride, 255, np.uint8), np.full(layout.head_stride, 255, np.uint8))
        for _ in range(2)
    )
    with ThreadPoolExecutor(1) as downs:
        for chunk in encode.expert_chunks(Arrays(arrays), downs, layout, where, *found):
            chunk()
    *gate, up, down = list(arrays.values())[: math.matrices]
    biases = [bias[0] for bias in list(arrays.values())[math.matrices :]]
    layout.encode_expert(gate[0] if gate else None, up, down, *wanted, biases)
    for part, of_layout in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(part, of_layout)


def as_codes(format_name: str, w: np.ndarray) -> Codes:
    """Numbers as a quantized file could have them."""
    if format_name == "fp8":
        return fp8_codes(w)
    group = CODE_FORMATS[format_name].group
    if not CODE_FORMATS[format_name].zeros:
        # Each matrix has another factor.
        return rounded(w, format_name, 0.001 * len(w) if format_name == "nvfp4" else 1.0)
    groups = len(w), -(-w.shape[1] // group)
    scales = np.linspace(0.01, 0.05, groups[0] * groups[1]).astype(np.float16).reshape(groups)
    zeros = (np.arange(groups[0] * groups[1]) % 17).astype(np.uint8).reshape(groups)
    codes = (np.abs(w) * 5).clip(0, 15).astype(np.uint8)
    return Codes(format_name, codes, scales.view(np.uint16), zeros)


def encoded_codes(format_name: str, stored_as: list[str], math: ExpertMath) -> tuple[StoreLayout, list, list]:
    """An expert whose matrices a file has as codes of these formats, in a store: its layout, the numbers that
    the file means, and the bytes of tiles and heads."""
    random, form = np.random.default_rng(4), format_named(format_name)
    shape = ExpertShape(1, 1, 160, 200, max(64, form.granularity), math)
    layout = StoreLayout(shape, form)
    sizes = [(200, 160)] * (math.matrices - 1) + [(160, 200)]
    parts: dict[str, np.ndarray | Codes] = {}
    for n, (size, name) in enumerate(zip(sizes, stored_as, strict=False)):
        parts[str(n)] = as_codes(name, random.standard_normal(size).astype(np.float32))
    for n in range(math.biases):
        parts[f"bias {n}"] = random.standard_normal((1, 200)).astype(np.float32)
    where = tuple(TensorRows(name, w.shape, 0, w.shape[0]) for name, w in parts.items())
    found = [np.full(layout.expert_stride, 255, np.uint8), np.full(layout.head_stride, 255, np.uint8)]
    with ThreadPoolExecutor(1) as downs:
        for chunk in encode.expert_chunks(Arrays(parts), downs, layout, where, *found):
            chunk()
    return layout, [w.values() if isinstance(w, Codes) else w[0] for w in parts.values()], found


FILE_FORMAT_NAMES = [name for name in FORMATS if name in CODE_FORMATS]


@pytest.mark.parametrize("math", [ExpertMath(), ExpertMath(bias=True), ExpertMath(Relu2())])
@pytest.mark.parametrize("format_name", FILE_FORMAT_NAMES)
def test_codes_of_the_stores_format_come_without_loss_into_tiles(format_name, math, monkeypatch):
    monkeypatch.setattr(encode, "CHUNK_NUMBERS", 3000)
    layout, parts, (out, heads) = encoded_codes(format_name, [format_name] * 3, math)
    shape = layout.shape
    wide = math.matrices - 1
    for tile in range(shape.tiles):
        data, _ = layout.tile_of(out, heads, tile)
        lo, hi = tile * shape.tile, min((tile + 1) * shape.tile, shape.intermediate)
        matrices = tile_numbers(layout, torch.from_numpy(data)).numpy()
        for n, found in enumerate(matrices):
            numbers = parts[n][lo:hi] if n < wide else parts[n][:, lo:hi].T
            np.testing.assert_array_equal(found[: hi - lo], numbers)
            assert n == wide or not found[hi - lo :].any()
        for to, of_expert in zip(layout.biases_of(out, heads, tile), parts[wide + 1 :], strict=True):
            np.testing.assert_array_equal(to[: hi - lo], of_expert[lo:hi])
            assert not to[hi - lo :].any()


@pytest.mark.parametrize("format_name", FORMATS)
def test_other_codes_are_encoded_as_the_numbers_that_they_mean(format_name, monkeypatch):
    monkeypatch.setattr(encode, "CHUNK_NUMBERS", 3000)
    kept = IN_Q8_0 if format_name == "q8_0" else {format_name}
    stored = [name for name in ("q8_0", "int4-f16-g128", "fp8", "mxfp4", "nvfp4") if name not in kept][:3]
    layout, (gate, up, down), found = encoded_codes(format_name, stored, ExpertMath())
    wanted = [np.full(len(part), 255, np.uint8) for part in found]
    layout.encode_expert(gate, up, down, *wanted)
    for part, of_layout in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(part, of_layout)
