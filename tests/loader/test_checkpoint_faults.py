"""Unusable checkpoints are refused before anything is allocated, with one line that names the file, the
tensor if one is at fault, and the remedy."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_checkpoint
import torch
from loader_harness import Supervisor, exists
from safetensors.torch import load_file, save_file

from pipeline.checkpoint.open import Checkpoint
from pipeline.errors import ModelError

DOWN = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def refusal(folder: Path) -> str:
    """The error line for a model."""
    with pytest.raises(ModelError) as caught:
        Checkpoint(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 400 + len(str(folder)) * 2
    assert str(folder) in text
    return text


Tensors = dict[str, torch.Tensor]


def changed(folder: Path, change: Callable[[Tensors], object], shards: int = 1) -> Path:
    """A checkpoint with tensors modified by `change`."""
    tensors = tiny_checkpoint.backbone_tensors(tiny_checkpoint.config()) | tiny_checkpoint.expert_tensors()
    change(tensors)
    return tiny_checkpoint.write_exactly(folder, tensors, shards)


def configured(folder: Path, **keys: object) -> Path:
    """A valid checkpoint with other keys in its config.json."""
    tiny_checkpoint.write(folder)
    (folder / "config.json").write_text(json.dumps(tiny_checkpoint.config() | keys))
    return folder


def test_unchanged_checkpoint_is_accepted(tmp_path):
    assert not Checkpoint(changed(tmp_path / "one", lambda tensors: None)).fused
    assert not Checkpoint(changed(tmp_path / "three", lambda tensors: None, shards=3)).fused


# --- tensors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [DOWN, QUERY, "lm_head.weight"])
@pytest.mark.parametrize(("shards", "file"), [(1, SINGLE), (3, INDEX)])
def test_missing_tensor_is_named(tmp_path, name, shards, file):
    text = refusal(changed(tmp_path, lambda tensors: tensors.pop(name), shards))
    assert f"{tmp_path / file} lacks the tensor {name}: " in text
    assert "incomplete" in text


def test_missing_tensors_are_counted(tmp_path):
    def without_experts(tensors: Tensors) -> None:
        for name in [n for n in tensors if ".experts." in n]:
            del tensors[name]

    text = refusal(changed(tmp_path, without_experts))
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight (and 17 others)" in text


def test_half_of_a_fused_checkpoint_is_refused(tmp_path):
    settings = tiny_checkpoint.config()
    tensors = tiny_checkpoint.backbone_tensors(settings, fused=True)
    for layer in range(2):
        tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.zeros(3, 200, 64)
    tensors["model.layers.0.mlp.experts.down_proj"] = torch.zeros(3, 64, 100)
    text = refusal(tiny_checkpoint.write_exactly(tmp_path, tensors))
    assert "lacks the tensor model.layers.1.mlp.experts.down_proj: " in text


@pytest.mark.parametrize("name", [DOWN, QUERY])
@pytest.mark.parametrize(("shards", "pattern"), [(1, SINGLE), (3, "model-0000?-of-00003.safetensors")])
def test_tensor_of_another_shape_is_named(tmp_path, name, shards, pattern):
    found = {}

    def transpose(tensors: Tensors) -> None:
        found["right"] = list(tensors[name].shape)
        tensors[name] = torch.zeros(found["right"][1] + 1, found["right"][0])
        found["wrong"] = list(tensors[name].shape)

    text = refusal(changed(tmp_path, transpose, shards))
    assert f"the tensor {name} has the shape {found['wrong']}; config.json gives {found['right']}" in text
    holder = next(p for p in tmp_path.glob(pattern) if name in load_file(p))
    assert text.startswith(str(holder))


def test_tensors_of_another_shape_are_counted(tmp_path):
    text = refusal(configured(tmp_path, intermediate_size=96))
    assert "has the shape [100, 64]; config.json gives [96, 64] (and 17 others differ)" in text


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float64])
def test_unsupported_dtype_is_named(tmp_path, dtype):
    text = refusal(changed(tmp_path, lambda t: t.update({DOWN: t[DOWN].to(dtype)})))
    assert f"{tmp_path / SINGLE}: the tensor {DOWN} has the dtype " in text
    assert "only BF16, F16, F32 are read" in text
    assert "not quantized" in text


def test_unknown_tensor_is_named(tmp_path):
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight_scale_inv"
    text = refusal(changed(tmp_path, lambda tensors: tensors.update({name: torch.ones(1)})))
    assert f"{tmp_path / SINGLE}: the tensor {name} is not one of a mixtral model" in text
    more = {f"lm_head.{word}": torch.ones(1) for word in ("lora_A", "lora_B")}
    text = refusal(changed(tmp_path, lambda tensors: tensors.update(more)))
    assert "lm_head.lora_A is not one of a mixtral model (and 1 other)" in text


def test_optional_tensors_are_ignored(tmp_path):
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8, dtype=torch.float64)}
    Checkpoint(changed(tmp_path / "a", lambda tensors: tensors.update(more)))
    tied = configured(tmp_path / "b", tie_word_embeddings=True)
    Checkpoint(tied)


# --- files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_truncated_shard_is_refused(tmp_path, shards):
    changed(tmp_path, lambda tensors: None, shards)
    path = sorted(tmp_path.glob("*.safetensors"))[-1]
    whole = path.stat().st_size
    last = max(header_of(path).items(), key=lambda item: item[1]["data_offsets"])[0]
    for cut in (1, 100):
        os.truncate(path, whole - cut)
        text = refusal(tmp_path)
        assert f"{path} has {whole - cut} of {whole} bytes, it ends before the end of {last!r}" in text
        assert "incomplete" in text
    os.truncate(path, 50)
    assert f"{path} is cut short within its header" in refusal(tmp_path)


def header_of(path: Path) -> dict:
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    header.pop("__metadata__", None)
    return header


def with_header(path: Path, header: dict) -> None:
    """Replace the header before the same tensors."""
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    packed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(packed)) + packed + data[start:])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": [1 << 40, 64]}, "which is not its shape's and dtype's size"),
        ({"dtype": "F32"}, "which is not its shape's and dtype's size"),
        ({"data_offsets": [0, 1 << 50]}, "which is not its shape's and dtype's size"),
        ({"data_offsets": [1 << 50, (1 << 50) + 12800]}, "leave a hole before"),
        ({"data_offsets": [0, 12800]}, "overlap before"),
        ({"shape": [100, -64]}, "$.shape"),
    ],
)
def test_header_with_false_sizes_is_refused(tmp_path, change, words):
    changed(tmp_path, lambda tensors: None)
    header = header_of(tmp_path / SINGLE)
    assert header[DOWN]["data_offsets"] != [0, 12800]
    header[DOWN] |= change
    with_header(tmp_path / SINGLE, header)
    text = refusal(tmp_path)
    assert words in text
    assert str(tmp_path / SINGLE) in text
    assert any(repr(name) in text for name in header)


def test_consistent_shape_that_contradicts_the_config_is_refused(tmp_path):
    """The right number of bytes in another shape: only the config shows the error."""
    changed(tmp_path, lambda tensors: None)
    header = header_of(tmp_path / SINGLE)
    header[DOWN]["shape"] = [100, 64]
    with_header(tmp_path / SINGLE, header)
    assert f"{DOWN} has the shape [100, 64]; config.json gives [64, 100]" in refusal(tmp_path)


@pytest.mark.parametrize("shards", [1, 3])
def test_other_files_beside_the_checkpoint_are_ignored(tmp_path, shards):
    changed(tmp_path, lambda tensors: None, shards)
    for name in ("consolidated.safetensors", "consolidated.00.pth", "pytorch_model.bin", "model.gguf"):
        (tmp_path / name).write_bytes(b"not a readable file")
    Checkpoint(tmp_path)


def test_single_file_takes_precedence_over_an_index(tmp_path):
    """As in transformers, which keeps an old index when it saves again in one file."""
    changed(tmp_path, lambda tensors: None, 3)
    whole = tmp_path / "whole"
    changed(whole, lambda tensors: None)
    (whole / SINGLE).rename(tmp_path / SINGLE)
    for shard in tmp_path.glob("model-*.safetensors"):
        shard.unlink()
    assert (tmp_path / INDEX).exists()
    Checkpoint(tmp_path)


def test_git_lfs_pointer_is_refused(tmp_path):
    changed(tmp_path, lambda tensors: None)
    (tmp_path / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "git lfs pull" in refusal(tmp_path)


def test_pipe_instead_of_a_shard_is_refused(tmp_path):
    changed(tmp_path, lambda tensors: None)
    (tmp_path / SINGLE).unlink()
    os.mkfifo(tmp_path / SINGLE)
    assert f"{SINGLE} cannot be read: it is not a file" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["consolidated.safetensors", "adapter_model.safetensors"])
def test_safetensors_of_another_kind_are_refused(tmp_path, name):
    changed(tmp_path, lambda tensors: None)
    (tmp_path / SINGLE).rename(tmp_path / name)
    text = refusal(tmp_path)
    assert name in text
    assert SINGLE in text
    assert INDEX in text


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt"])
def test_pickles_are_refused_with_the_reason(tmp_path, name):
    changed(tmp_path, lambda tensors: None)
    (tmp_path / SINGLE).unlink()
    torch.save({"weights": torch.ones(3)}, tmp_path / name)
    text = refusal(tmp_path)
    assert f"{name}, a pickle, which can run any code" in text
    assert "safetensors" in text


def test_gguf_is_refused(tmp_path):
    changed(tmp_path, lambda tensors: None)
    (tmp_path / SINGLE).rename(tmp_path / "model-q4_k_m.gguf")
    assert "model-q4_k_m.gguf, llama.cpp's format" in refusal(tmp_path)
    (tmp_path / "config.json").unlink()  # a GGUF file has the config in it
    assert "model-q4_k_m.gguf, llama.cpp's format" in refusal(tmp_path)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_quantized_checkpoint_is_refused(tmp_path, key):
    text = refusal(configured(tmp_path, **{key: {"quant_method": "fp8"}}))
    assert f"config.json has a {key} (fp8): checkpoints that are quantized already are not read" in text
    assert "--format" in text
    Checkpoint(configured(tmp_path, **{key: None}))


def test_shard_of_another_checkpoint_is_refused(tmp_path):
    """Its header is valid, but has other tensors."""
    changed(tmp_path, lambda tensors: None, shards=3)
    path = tmp_path / tiny_checkpoint.shard_name(1, 3)
    save_file({"other": torch.ones(3)}, path)
    text = refusal(tmp_path)
    assert f"lists '{min(n for n, f in index_of(tmp_path).items() if f == path.name)}' in {path.name}" in text


def index_of(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


# --- in the loader ------------------------------------------------------------------------------


def test_unquantizable_weights_are_named(supervisor: Supervisor, tmp_path):
    def insert_nan(tensors: Tensors) -> None:
        tensors[DOWN][3, 5] = float("nan")

    model = changed(tmp_path / "model", insert_nan)
    outcome = supervisor.load(model, format="int4", tile=64)
    assert "not a number" in outcome.refusal
    assert outcome.refusal.endswith(f"in the tensor {DOWN}")
    assert not exists(Checkpoint(model).fingerprint("int4", 64))


@pytest.mark.parametrize("fault", [lambda t: t.pop(DOWN), lambda t: t.update({DOWN: t[DOWN].double()})])
def test_loader_refuses_before_it_allocates(supervisor: Supervisor, tmp_path, fault):
    outcome = supervisor.load(changed(tmp_path / "model", fault))
    assert DOWN in outcome.refusal
    assert outcome.stages == []
