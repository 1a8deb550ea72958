"""Unusable checkpoints are refused before anything is allocated, with one line that names the file, the
tensor if one is at fault, and the remedy."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_checkpoint
import torch
from loader_harness import Supervisor, exists

from pipeline.checkpoint.open import Checkpoint
from pipeline.errors import ModelError

EXPERT = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
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


def unchanged(folder: Path, shards: int = 1) -> Path:
    return changed(folder, lambda tensors: None, shards)


def configured(folder: Path, **keys: object) -> Path:
    """A valid checkpoint with other keys in its config.json."""
    tiny_checkpoint.write(folder)
    (folder / "config.json").write_text(json.dumps(tiny_checkpoint.config() | keys))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_other_files_beside_a_checkpoint_are_ignored(tmp_path, shards):
    unchanged(tmp_path, shards)
    for name in ("consolidated.safetensors", "consolidated.00.pth", "pytorch_model.bin", "model.gguf"):
        (tmp_path / name).write_bytes(b"not a readable file")
    assert not Checkpoint(tmp_path).fused


# --- tensors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [DOWN, QUERY, "lm_head.weight"])
@pytest.mark.parametrize(("shards", "file"), [(1, SINGLE), (3, INDEX)])
def test_missing_tensor_is_named(tmp_path, name, shards, file):
    text = refusal(changed(tmp_path, lambda tensors: tensors.pop(name), shards))
    assert f"{tmp_path / file} lacks the tensor {name}: the download is incomplete" in text


def test_half_of_a_fused_checkpoint_is_refused(tmp_path):
    settings = tiny_checkpoint.config()
    tensors = tiny_checkpoint.backbone_tensors(settings, fused=True)
    for layer in range(2):
        tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.zeros(3, 200, 64)
    tensors["model.layers.0.mlp.experts.down_proj"] = torch.zeros(3, 64, 100)
    text = refusal(tiny_checkpoint.write_exactly(tmp_path, tensors))
    assert "lacks the tensor model.layers.1.mlp.experts.down_proj: " in text


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        (DOWN, torch.zeros(100, 64), "has the shape [100, 64]; config.json gives [64, 100]"),
        (QUERY, torch.zeros(65, 64), "has the shape [65, 64]; config.json gives [64, 64]"),
        (DOWN, torch.zeros(64, 100).to(torch.float8_e4m3fn), "has the dtype F8_E4M3; only BF16, F16, F32"),
        (DOWN, torch.zeros(64, 100, dtype=torch.float64), "has the dtype F64; only BF16, F16, F32 are read"),
        (f"{EXPERT}_scale_inv", torch.ones(1), "is not one of a mixtral model"),
        ("lm_head.lora_A", torch.ones(1), "is not one of a mixtral model"),
    ],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_tensor_of_another_model_is_named_with_its_file(tmp_path, name, tensor, words, shards):
    text = refusal(changed(tmp_path, lambda tensors: tensors.update({name: tensor}), shards))
    assert f": the tensor {name} {words}" in text
    file = SINGLE if shards == 1 else index_of(tmp_path)[name]
    assert text.startswith(f"{tmp_path / file}: ")


def test_optional_tensors_are_ignored(tmp_path):
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8, dtype=torch.float64)}
    Checkpoint(changed(tmp_path / "a", lambda tensors: tensors.update(more)))
    Checkpoint(configured(tmp_path / "b", tie_word_embeddings=True))


# --- files ------------------------------------------------------------------------------------------------


def test_missing_directory_and_file_are_refused(tmp_path):
    assert "does not exist" in refusal(tmp_path / "nowhere")
    (tmp_path / "model.gguf").touch()
    assert "not a directory" in refusal(tmp_path / "model.gguf")


def test_missing_or_damaged_config_is_refused(tmp_path):
    unchanged(tmp_path)
    (tmp_path / "config.json").unlink()
    assert "no config.json" in refusal(tmp_path)
    for text in ("{", "[]", "\xff", "[" * 100_000):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        assert "config.json is damaged" in refusal(tmp_path)


@pytest.mark.parametrize("shards", [1, 3])
def test_interrupted_download_is_refused(tmp_path, shards):
    path = sorted(unchanged(tmp_path, shards).glob("*.safetensors"))[-1]
    whole = path.stat().st_size
    for cut in (1, 100):
        os.truncate(path, whole - cut)
        text = refusal(tmp_path)
        assert f"{path} has {whole - cut} of {whole} bytes, it ends before the end of 'model." in text
        assert "incomplete" in text
    for size in (50, 0):
        os.truncate(path, size)
        assert f"{path} is cut short within its header" in refusal(tmp_path)
    path.unlink()
    if shards == 3:
        assert f"lacks 1 of 3 weight files (the first is {path.name})" in refusal(tmp_path)


def test_index_that_contradicts_its_files_is_refused(tmp_path):
    unchanged(tmp_path, shards=2)
    path = tmp_path / INDEX
    good = json.loads(path.read_text())

    def with_map(weight_map: object) -> str:
        path.write_text(json.dumps(good | {"weight_map": weight_map}))
        return refusal(tmp_path)

    files = good["weight_map"]
    name = next(iter(files))
    assert "lists 'absent'" in with_map(files | {"absent": files[name]})
    (other,) = set(files.values()) - {files[name]}
    assert f"lists {name!r} in {other}" in with_map(files | {name: other})
    for evil in ("../secret.safetensors", "/etc/passwd", "sub/x.safetensors", 7, ["x"]):
        assert "not a safetensors file beside it" in with_map(files | {name: evil})
    assert "no weight_map" in with_map({})
    assert "no weight_map" in with_map([])
    path.write_text("{")
    assert "not valid JSON" in refusal(tmp_path)


def index_of(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def test_tensor_in_two_files_is_refused(tmp_path):
    first, second = sorted(unchanged(tmp_path, shards=2).glob("*.safetensors"))
    second.write_bytes(first.read_bytes())
    assert "is in" in refusal(tmp_path)


def test_single_file_takes_precedence_over_an_index(tmp_path):
    """As in transformers, which keeps an old index when it saves again in one file."""
    unchanged(tmp_path, 3)
    (unchanged(tmp_path / "whole") / SINGLE).rename(tmp_path / SINGLE)
    for shard in tmp_path.glob("model-*.safetensors"):
        shard.unlink()
    assert (tmp_path / INDEX).exists()
    Checkpoint(tmp_path)


def test_git_lfs_pointer_is_refused(tmp_path):
    unchanged(tmp_path)
    (tmp_path / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "git lfs pull" in refusal(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("consolidated.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin", "a.pth"),
        *("model.pt", "model.ckpt", "model.pkl", "model-q4_k_m.gguf", None),
    ],
)
def test_weights_of_another_kind_are_refused_unread(tmp_path, name):
    (unchanged(tmp_path) / SINGLE).unlink()
    if name is not None:
        os.mkfifo(tmp_path / name)
    text = refusal(tmp_path)
    assert f"has {name or 'no weights'}, and neither {SINGLE} nor {INDEX}" in text


@pytest.mark.parametrize(
    ("key", "method", "said"),
    [
        ("quantization_config", "hqq", "hqq"),
        ("compression_config", "fp8", "an old version of compressed-tensors"),
    ],
)
def test_quantized_checkpoint_is_refused(tmp_path, key, method, said):
    text = refusal(configured(tmp_path, **{key: {"quant_method": method}}))
    assert f"config.json: quantized by {said}" in text
    assert "of quantized checkpoints those of awq, gptq, " in text
    assert "--format" in text
    Checkpoint(configured(tmp_path, **{key: None}))


# --- in the loader ------------------------------------------------------------------------------


def test_unquantizable_weights_are_named(supervisor: Supervisor, tmp_path):
    def insert_nan(tensors: Tensors) -> None:
        tensors[DOWN][3, 5] = float("nan")

    model = changed(tmp_path / "model", insert_nan)
    outcome = supervisor.load(model, format="int4", tile=64)
    assert "not a number" in outcome.refusal
    assert outcome.refusal.endswith(f"in the tensor {DOWN}")
    assert not exists(Checkpoint(model).fingerprint("int4", 64))
