"""Pipes, devices and large files in the place of a model's files: one line each, at once."""

from __future__ import annotations

import json
import os
import shutil
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from launch.command_line.checks import check_engine, check_reads_text
from pipeline.checkpoint.index import INDEX_FILE, SINGLE_FILE, CheckpointIndex, read_fields
from pipeline.checkpoint.open import Checkpoint
from pipeline.config import EngineConfig
from pipeline.errors import ModelError, UsageError
from pipeline.models.config_keys import for_transformers
from pipeline.models.facts import expert_shape, facts_of
from pipeline.policies.costs import Costs
from pipeline.text.tokenizer import Tokenizer
from shm.layout import format_named

READ = ("config.json", "generation_config.json", SINGLE_FILE)
TEXT = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
)


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def replace_by(kind: str, path: Path) -> None:
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 40)  # sparse


def change(folder: Path, **entries: object) -> None:
    """Change config.json."""
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | entries))


def refusal(read: object) -> str:
    began = time.monotonic()
    with pytest.raises(UsageError) as failure:
        read()  # type: ignore[operator]
    assert time.monotonic() - began < 5  # it takes milliseconds
    assert "\n" not in str(failure.value)
    return str(failure.value)


@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
@pytest.mark.parametrize("name", [*READ, INDEX_FILE])
def test_settings_and_weights_are_bounded(folder: Path, name: str, kind: str) -> None:
    if name == INDEX_FILE:
        (folder / SINGLE_FILE).rename(folder / "model-00001-of-00001.safetensors")
    replace_by(kind, folder / name)
    assert f"{folder / name} " in refusal(lambda: check_engine(EngineConfig(model=folder)))


@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
@pytest.mark.parametrize("name", TEXT)
def test_files_of_the_tokenizer_are_bounded(folder: Path, name: str, kind: str) -> None:
    replace_by(kind, folder / name)
    assert f"{folder / name} cannot be read" in refusal(lambda: Tokenizer.load(folder))
    if name == "tokenizer_config.json":
        (folder / "chat_template.jinja").unlink()
        assert f"{folder / name} cannot be read" in refusal(lambda: check_reads_text(folder, chats=True))


def test_a_shard_that_becomes_a_pipe_is_not_waited_for(folder: Path) -> None:
    model = Checkpoint(folder)
    replace_by("pipe", folder / SINGLE_FILE)
    with model.tensors() as tensors:
        refusal(lambda: tensors.float32("model.norm.weight", (64,)))


@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
def test_costs_are_bounded(tmp_path: Path, kind: str) -> None:
    replace_by(kind, tmp_path / "costs.json")
    refusal(lambda: Costs.load(tmp_path / "costs.json"))


def test_deep_nesting_is_one_line(folder: Path) -> None:
    """The parser's stack suffices for it, and that of a fingerprint or an error's text does not."""
    text = (folder / "config.json").read_text().rstrip("} \n")
    for levels in (100, 500, 800, 900, 950, 100_000):
        (folder / "config.json").write_text(f'{text}, "sliding_window": {"[" * levels}{"]" * levels}}}')
        assert refusal(lambda: Checkpoint(folder)).startswith(str(folder))


def test_tokenizer_of_another_name_is_refused(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["fast_tokenizer_files"] = ["../../tokenizer.0.1.json"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="fast_tokenizer_files"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("fused", [False, True])
def test_config_with_millions_of_experts_is_refused_before_they_are_listed(folder: Path, fused: bool) -> None:
    change(folder, num_hidden_layers=1000, num_local_experts=10_000 if fused else 1000)
    if fused:
        save_file({"model.layers.0.mlp.experts.gate_up_proj": np.zeros(1, np.float32)}, folder / SINGLE_FILE)
    tracemalloc.start()
    try:
        refusal(lambda: Checkpoint(folder))
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "entries",
    [
        {"rms_norm_eps": 10**400},
        {"rope_theta": 10**4200},
        {"hidden_size": 10**4200},
        {"hidden_size": list(range(100_000))},
        {"hidden_act": "a" * 1_000_000},
        {"model_type": ["a"] * 100_000},
        {"tie_word_embeddings": ["a"] * 100_000},
        {"rope_scaling": {"type": "a" * 1_000_000}},
        {"model_type": "qwen2_moe", "mlp_only_layers": ["a"] * 100_000},
        {"model_type": "qwen2_moe", "mlp_only_layers": list(range(1000, 500_000)), "num_hidden_layers": 1000},
    ],
)
def test_values_of_any_size_are_one_short_line(folder: Path, entries: dict[str, object]) -> None:
    change(folder, **entries)
    assert len(refusal(lambda: Checkpoint(folder))) < 400


@pytest.mark.parametrize("key", ["intermediate_size", "hidden_size", "vocab_size"])
def test_sizes_that_no_model_has_are_refused_before_tiles_are_chosen(folder: Path, key: str) -> None:
    settings = json.loads((folder / "config.json").read_text()) | {key: 2**31 - 1}
    assert "makes no sense" in refusal(lambda: expert_shape(settings, None, format_named("bf16")))


def test_header_with_millions_of_tensors_is_refused(folder: Path) -> None:
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({str(i): entry for i in range(300_000)}).encode()
    (folder / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header)
    assert "has more than" in refusal(lambda: Checkpoint(folder))


def test_header_of_millions_of_other_entries_is_refused_before_they_are_read(folder: Path) -> None:
    header = b"{%s}" % b",".join(b'"%d":0' % i for i in range(1_500_000))
    (folder / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header)
    tracemalloc.start()
    try:
        assert "has more than" in refusal(lambda: Checkpoint(folder))
        assert tracemalloc.get_traced_memory()[1] < 2 * len(header)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("value", ["[]", "{}", "1"])
def test_settings_of_millions_of_values_are_refused_before_these_are_made(folder: Path, value: str) -> None:
    """A file as large as it may be would take gigabytes."""
    path = folder / "tokenizer_config.json"
    path.write_text(f'{{"a": [{",".join([value] * 1_100_000)}]}}')
    size = path.stat().st_size
    tracemalloc.start()
    try:
        assert str(path) in refusal(lambda: read_fields(path, size))
        assert tracemalloc.get_traced_memory()[1] < 3 * size
    finally:
        tracemalloc.stop()


def test_transformers_makes_no_list_of_a_billion_labels() -> None:
    config = {"num_labels": 10**9, "id2label": {"0": "a"}, "text_config": {"num_labels": 10**9, "a": [1]}}
    assert for_transformers(config) == {"text_config": {"a": [1]}}


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer", "encoder_layers"])
def test_a_billion_layers_are_refused_before_transformers_lists_them(key: str) -> None:
    assert "make no sense" in refusal(lambda: for_transformers({"text_config": {key: 10**9}}))


def test_text_that_is_no_unicode_is_one_line_for_a_family_of_transformers() -> None:
    assert "not valid Unicode" in refusal(lambda: facts_of({"model_type": "granitemoe", "a": "\ud800"}))


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json"]
)
def test_text_of_a_model_is_no_link_to_another_folder(folder: Path, tmp_path: Path, name: str) -> None:
    """Else the model could have any of the user's files rendered into its answers."""
    source = folder / name
    content = source.read_bytes() if source.exists() else b"{}"
    (tmp_path / "secret").write_bytes(content)
    source.unlink(missing_ok=True)
    source.symlink_to(tmp_path / "secret")

    def read() -> None:
        check_engine(EngineConfig(model=folder))
        Tokenizer.load(folder)

    assert refusal(read).startswith(f"{source} cannot be read: it is a link out of the model's folder")


def test_links_of_the_hubs_cache_and_linked_weights_are_followed(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b/snapshots/1234"
    blobs = tmp_path / "models--a--b/blobs"
    for path in (snapshot, blobs):
        path.mkdir(parents=True)
    for file in folder.iterdir():
        file.rename((tmp_path if file.name == SINGLE_FILE else blobs) / file.name)
        linked = tmp_path / file.name if file.name == SINGLE_FILE else Path("../../blobs") / file.name
        (snapshot / file.name).symlink_to(linked)
    check_engine(EngineConfig(model=snapshot))
    assert Tokenizer.load(snapshot) is not None
    (snapshot / "chat_template.jinja").unlink()
    (snapshot / "chat_template.jinja").symlink_to("../../../secret")
    assert "link out of the model's folder" in refusal(lambda: Tokenizer.load(snapshot))


@pytest.mark.parametrize("place", ["mine/snapshots/1234", "models--a--b/copies/1234"])
def test_only_the_hubs_cache_has_links_beside_a_model(folder: Path, tmp_path: Path, place: str) -> None:
    copy = tmp_path / place
    copy.parent.mkdir(parents=True)
    folder.rename(copy)
    template = copy / "chat_template.jinja"
    secret = copy.parent.parent / "secret"
    secret.write_text("{{ messages }}")
    template.unlink(missing_ok=True)
    template.symlink_to(secret)
    assert refusal(lambda: Tokenizer.load(copy)).startswith(f"{template} cannot be read: it is a link out")


@pytest.mark.parametrize("name", ["model-\udcff.safetensors", "model-\n.safetensors", "model-\0.safetensors"])
def test_shard_whose_name_no_download_has_is_refused(folder: Path, name: str) -> None:
    if "\0" not in name:
        shutil.copy(folder / SINGLE_FILE, folder / name)
    tensors = list(CheckpointIndex.open(folder).tensors)
    (folder / SINGLE_FILE).unlink()
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
    assert "is not a safetensors file beside it" in refusal(
        lambda: Checkpoint(folder).fingerprint("bf16", 32)
    )
