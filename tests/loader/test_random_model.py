"""Shapes with random weights: their names, their configs, their bytes, and how the loader treats them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding import decode
from filled_store import Enough, Stop
from loader_harness import Supervisor, exists
from tiny_families import model_class, tiny_config

from pipeline import assets
from pipeline.checkpoint.open import open_model
from pipeline.errors import ModelError
from pipeline.models.facts import expert_shape
from pipeline.models.shapes import SHAPES, shape_config, short_name, with_whole_path
from shm.layout import FORMATS, format_named
from shm.segment import unlink
from shm.store import Store, StoreBuilder, StoreManifest, store_name

TINY: dict[str, Any] = SHAPES["mixtral-8x7b"] | {
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
}
TILE = 128  # whole groups of every format; 320 channels are 2.5 tiles


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another entry of SHAPES."""
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    return Path("shape:tiny")


@contextmanager
def drawn(model: Path, format_name: str, progress: list[int] | None = None) -> Iterator[Store]:
    """The store of a shape, filled in this process."""
    source = open_model(model)
    shape = expert_shape(source.config, TILE, format_named(format_name))
    fingerprint = source.fingerprint(format_name, TILE)
    name = f"{store_name(fingerprint)}-{os.getpid()}"
    builder = StoreBuilder.create(name, StoreManifest(fingerprint, shape, format_name, source.name))
    try:
        assert source.fill(builder, [].append if progress is None else progress.append) == 0
        builder.finish()
        with Store.attach(name, fingerprint) as store:
            yield store
    finally:
        unlink(name)


def bytes_of(model: Path, format_name: str) -> bytes:
    with drawn(model, format_name) as store:
        layout = store.layout
        every = [
            store.heads(n, e, 0, layout.shape.tiles).tobytes()
            + store.tiles(n, e, 0, layout.shape.tiles).tobytes()
            for n in range(layout.shape.layers)
            for e in range(layout.shape.experts)
        ]
    assert len(set(every)) == len(every)  # no two experts are the same
    return b"".join(every)


# --- names and configs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shape:foo", ["'foo'", *SHAPES]),
        ("shape:", ["''", *SHAPES]),
        ("shape:Mixtral-8x7B", ["mixtral-8x7b"]),
        *((f"shape:mixtral-8x7b/{n}", ["shape:mixtral-8x7b/N", "1 to 32"]) for n in (0, 33, 99, "x", "", -1)),
        *((f"shape:mixtral-8x22b/{n}", ["1 to 56"]) for n in (57, "4/4", "1e1", " 4", "٤", "9" * 5000)),
    ],
)
def test_unknown_shape_name_is_one_line(name: str, words: list[str]) -> None:
    with pytest.raises(ModelError) as failure:
        shape_config(name)
    line = str(failure.value)
    assert "\n" not in line
    assert all(word in line for word in words), line


def test_shape_has_the_requested_layers() -> None:
    assert open_model(Path("shape:mixtral-8x7b")).config["num_hidden_layers"] == 32
    four = open_model(Path("shape:mixtral-8x7b/4"))
    assert four.config == SHAPES["mixtral-8x7b"] | {"num_hidden_layers": 4}
    assert SHAPES["mixtral-8x7b"]["num_hidden_layers"] == 32
    assert (four.name, four.worth_keeping("int4")) == ("shape:mixtral-8x7b/4", False)


def test_each_shape_is_listed_once() -> None:
    text = (Path(assets.__file__).parent / "shapes.json").read_text()
    assert re.findall(r'^  "(.*)": {$', text, re.MULTILINE) == [*SHAPES]


def test_experts_of_known_shapes_need_little_padding() -> None:
    for name, format_name in product(SHAPES, FORMATS):
        shape = expert_shape(SHAPES[name], None, format_named(format_name))
        padded = (shape.intermediate, shape.padded)
        assert padded[0] == padded[1] or padded == (2880, 2944), (name, format_name)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """Of a family of our own, quantized."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY | {"quantization_config": {"quant_method": "awq"}}))
    return path


def test_shape_of_a_config_file_depends_on_what_it_says(config_file: Path) -> None:
    shape = open_model(Path(f"shape:{config_file}"))
    assert shape.config == TINY
    fingerprint = shape.fingerprint("int4", TILE)
    copy = config_file.with_name("other.json")
    copy.write_bytes(config_file.read_bytes())
    assert open_model(Path(f"shape:{copy}")).fingerprint("int4", TILE) == fingerprint
    two = open_model(Path(f"shape:{copy}/2"))
    assert (two.config, two.name) == (TINY | {"num_hidden_layers": 2}, f"shape:{copy}/2")
    whole = bytes_of(Path(f"shape:{copy}"), "bf16")
    assert whole.startswith(bytes_of(Path(f"shape:{config_file}/2"), "bf16"))
    copy.write_text(json.dumps(TINY | {"rms_norm_eps": 1e-4}))
    assert open_model(Path(f"shape:{copy}")).fingerprint("int4", TILE) != fingerprint


def test_first_layers_of_a_model_that_also_sees(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"], "other": [1, 2]}
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": text, "vision_config": {"x": [1, 2, 3]}})
    )
    _, config = shape_config(f"shape:{tmp_path}/config.json/2")
    assert config["text_config"] == {"num_hidden_layers": 2, "layer_types": ["a", "b"], "other": [1, 2]}
    assert config["vision_config"] == {"x": [1, 2, 3]}


@pytest.mark.parametrize(
    ("text", "layers", "words"),
    [
        (None, "", "cannot be read"),
        ("{", "", "damaged"),
        ("[]", "", "no model's config"),
        ('{"text_config": 3}', "", "no model's config"),
        ("{}", "/2", "leave out /N"),
        ('{"num_hidden_layers": 3}', "/4", "from 1 to 3"),
        ('{"num_hidden_layers": 3}', "/", "from 1 to 3"),
    ],
)
def test_unusable_config_file_is_one_line(text: str | None, layers: str, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=words) as failure:
        shape_config(f"shape:{tmp_path}/config.json{layers}")
    assert "\n" not in str(failure.value)


def test_path_of_a_shape_means_the_same_in_every_process(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert with_whole_path("shape:a/config.json") == f"shape:{tmp_path}/a/config.json"
    assert with_whole_path("shape:a/config.json/3") == f"shape:{tmp_path}/a/config.json/3"
    assert with_whole_path("shape:mixtral-8x7b/3") == "shape:mixtral-8x7b/3"


def test_fingerprint_depends_on_shape_layers_format_and_tile() -> None:
    def fingerprint(name: str, format_name: str = "int4", tile: int = 128) -> str:
        return open_model(Path(f"shape:{name}")).fingerprint(format_name, tile)

    first = fingerprint("mixtral-8x7b/4")
    assert first == fingerprint("mixtral-8x7b/4")
    assert len(first) == 64
    others = [fingerprint("mixtral-8x7b"), fingerprint("mixtral-8x7b/3"), fingerprint("mixtral-8x22b/4")]
    others += [fingerprint("mixtral-8x7b/4", "int8"), fingerprint("mixtral-8x7b/4", tile=256)]
    assert len({first, *others}) == 6
    assert fingerprint("mixtral-8x7b") == fingerprint("mixtral-8x7b/32")


def test_short_names() -> None:
    assert short_name("shape:mixtral-8x7b/4") == "shape:mixtral-8x7b/4"
    assert short_name("/models/Mixtral-8x7B") == "Mixtral-8x7B"
    assert short_name("/hub/models--org--a-b/snapshots/0123abc") == "org/a-b"
    assert short_name("/x/snapshots/0123abc") == "0123abc"


# --- what is drawn ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("format_name", FORMATS)
def test_bytes_do_not_depend_on_the_number_of_cores(format_name: str, tiny: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    alone = bytes_of(tiny, format_name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)))
    assert bytes_of(tiny, format_name) == alone
    # A shape with fewer layers has the first ones.
    assert alone.startswith(fewer := bytes_of(Path(f"{tiny}/2"), format_name))
    assert len(fewer) == len(alone) * 2 // 3


@pytest.mark.parametrize("format_name", FORMATS)
def test_weights_have_the_documented_scale_and_zero_padding(format_name: str, tiny: Path) -> None:
    progress: list[int] = []
    with drawn(tiny, format_name, progress) as store:
        layout = store.layout
        assert layout.shape.tiles == 3
        for tile in range(3):
            data, head = store.tiles(1, 2, tile, tile + 1), store.heads(1, 2, tile, tile + 1)
            numbers = decode(layout.format, data, layout.shape.hidden, TILE, head)  # [3, T, H]
            used = min(TILE, 320 - tile * TILE)
            for matrix in numbers:
                assert abs(matrix[:used].mean()) < 0.002
                assert matrix[:used].std() == pytest.approx(256**-0.5, rel=0.1)
            # Where gate and up are zero, down has no effect.
            assert not numbers[:2, used:].any()
    assert progress == sorted(progress)
    assert progress[-1] == layout.total_bytes
    assert len(progress) >= layout.shape.layers * layout.shape.experts


def test_exception_of_progress_ends_fill(tiny: Path) -> None:
    with pytest.raises(Enough), drawn(tiny, "bf16", Stop()):
        pass


def test_backbone_tensors_are_reproducible_and_scaled(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> list[np.ndarray]:
        with open_model(tiny).tensors() as tensors:
            large = tensors.float32("a", (9000, 512))  # several blocks
            bias = tensors.float32("model.norm.bias", (512,))
            return [large, tensors.float32("b", (300, 512)), tensors.float32("norm", (512,)), bias]

    first = read()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    for one, again in zip(first, read(), strict=True):
        np.testing.assert_array_equal(one, again)
    large, other, norm, bias = first
    assert {t.dtype for t in first} == {np.dtype(np.float32)}
    assert large.std() == pytest.approx(512**-0.5, rel=0.01)
    assert abs(large.mean()) < 1e-4
    assert not np.array_equal(large[:300], other)
    assert not np.array_equal(large[:4096], large[4096:8192])
    assert (norm == 1).all()
    assert (bias == 0).all()


def test_numbers_and_bits_of_a_backbone_tensor_agree(tiny: Path) -> None:
    with open_model(tiny).tensors() as tensors:
        raw = tensors.stacked([("a", (300, 512)), ("b", (200, 512))])
        numbers = np.concatenate([tensors.float32("a", (300, 512)), tensors.float32("b", (200, 512))])
    assert (raw.dtype, raw.shape) == ("BF16", (500, 512))
    np.testing.assert_array_equal(raw.bits.astype(np.uint32) << 16, numbers.view(np.uint32))


def test_random_parameters_of_a_family_without_an_architecture(tmp_path: Path) -> None:
    """Recurrent layers decay, norms and biases do nothing, matrices are scaled by their inputs."""
    config = tiny_config("bailing_hybrid")
    config.save_pretrained(tmp_path)

    def read() -> dict[str, torch.Tensor]:
        with open_model(Path(f"shape:{tmp_path}/config.json")).tensors() as tensors:
            return {name: tensors[name] for name in tensors}

    found, again = read(), read()
    state = model_class(config)(config).state_dict()
    routed = [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert routed
    assert found.keys() == state.keys() - {*routed}
    for name, tensor in found.items():
        assert torch.equal(tensor, again[name]), name
        assert tensor.shape == state[name].shape
        assert tensor.isfinite().all()
        if tensor.dim() == 2 and tensor.numel() > 1000:
            assert tensor.float().std() == pytest.approx(tensor.shape[-1] ** -0.5, rel=0.15), name
    with open_model(Path(f"shape:{tmp_path}/config.json")).tensors() as tensors:
        rows = tensors.table("a.table.weight", (1 << 40, 64)).rows(np.array([7, 1 << 39]))
    assert rows.shape == (2, 64)
    assert rows.std() == pytest.approx(64**-0.5, rel=0.3)
    decays = [tensor for name, tensor in found.items() if name.endswith("A_log")]
    assert all((decay.exp() >= 1).all() and (decay.exp() <= 16).all() for decay in decays)
    assert (found["model.norm.weight"] == 1).all()


def test_routers_choose_all_experts_about_equally_often(tiny: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((2000, 2048)).astype(np.float32)
    with open_model(tiny).tensors() as tensors:
        router = tensors.float32("model.layers.0.mlp.gate.weight", (128, 2048))
    chosen = np.argsort(-(rows @ router.T), axis=1)[:, :8]
    share = np.bincount(chosen.reshape(-1), minlength=128) / chosen.size * 128
    assert share.min() > 0.7
    assert share.max() < 1.3


# --- the loader ------------------------------------------------------------------------------------------


def test_loader_draws_a_shape_without_caching_it_and_attaches_it_again(supervisor: Supervisor) -> None:
    asked = {"format": "int4", "tile": 448}  # an unusual tile, so that no running engine has this store
    first = supervisor.load(Path("shape:olmoe-1b-7b/1"), **asked)
    assert first.ready.notes[0].startswith("source random weights: 0 B read")
    assert first.stages == ["allocating", "drawing random experts"]
    assert not list(supervisor.cache.glob("*"))
    again = supervisor.load(Path("shape:olmoe-1b-7b/1"), **asked)
    assert again.ready.fingerprint == first.ready.fingerprint
    assert again.source == "attached"
    with Store.attach(store_name(first.ready.fingerprint)) as store:
        assert store.manifest.source == "shape:olmoe-1b-7b/1"


def test_shape_that_does_not_fit_is_refused_before_allocation(supervisor: Supervisor) -> None:
    model = Path("shape:mixtral-8x22b")
    outcome = supervisor.load(model, format="bf16", tile=None, reserve_bytes=1 << 60)
    assert "270.58 GB of shared memory" in outcome.refusal
    tile = expert_shape(SHAPES["mixtral-8x22b"], None, format_named("bf16")).tile
    assert not exists(open_model(model).fingerprint("bf16", tile))


@pytest.mark.parametrize(("asked", "word"), [({"tile": 100}, "--tile 100"), ({"format": "int3"}, "int3")])
def test_unsupported_tile_and_format_are_one_line(supervisor: Supervisor, asked: dict, word: str) -> None:
    assert word in supervisor.load(Path("shape:mixtral-8x7b/1"), **({"format": "int4"} | asked)).refusal
