"""What transformers says of a config.json: facts for planning, what experts compute, what cannot be run."""

from __future__ import annotations

import json
import logging
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from expected_errors import expect_error
from fork_server import ForkedPython
from tiny_families import FAMILIES, tiny_config, tiny_model
from torch import nn

from launch.cache.command import scan
from pipeline.checkpoint.converted import check_headers
from pipeline.checkpoint.decoder import decoder_of, experts_used, found_math, without_memory
from pipeline.errors import ModelError
from pipeline.generic.describe import describe
from pipeline.models import facts
from pipeline.models.facts import ModelFacts, facts_of, pack
from pipeline.models.registry import ARCHITECTURES
from pipeline.models.transformers_log import to_own_log
from shm.expert_math import GELU_ALPHA, GELU_CUBIC, SWIGLU, ExpertMath, Glu, Relu2

SAMPLE = (
    "deepseek_v3",
    "ernie4_5_vl_moe",
    "gemma4",
    "granitemoehybrid",
    "lfm2_moe",
    "nemotron_h",
    "qwen3_next",
)
EVERY = [pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES if family not in SAMPLE]


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """A small config.json."""
    config: dict[str, Any] = json.loads(tiny_config(family, **changes).to_json_string())
    return config


def described(config: dict[str, Any]) -> ModelFacts:
    """As the child process answers."""
    return describe(without_memory(*decoder_of(config)))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Configs that were described, in this process, with an empty cache."""
    configs: list[Any] = []

    def ask(question: bytes) -> bytes:
        configs.append(msgspec.json.decode(question)["config"])
        return pack(described(configs[-1]))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(facts, "_ask", ask)
    facts._described.cache_clear()
    return configs


@pytest.mark.parametrize("family", [*SAMPLE, *EVERY])
def test_facts_are_those_of_the_model_with_memory(family: str) -> None:
    model = tiny_model(family)
    found = described(model.config.to_dict())
    decoder = model.get_decoder()
    names = experts_used(without_memory(type(model), model.config))
    used = [model.get_submodule(name) for name in names]
    shapes = {(len(m.down_proj), *sorted(m.down_proj.shape[1:])) for m in used}
    assert shapes == {(found.experts, *sorted((found.hidden, found.intermediate)))}
    assert (len(found.moe_layers), found.top_k) == (len(used), 1 if family == "zaya" else 2)
    not_used = {
        p
        for m in decoder.modules()
        if hasattr(type(m), "_apply_gate") and m not in used
        for p in m.parameters()
    }
    head = model.get_output_embeddings()
    whole = {*decoder.parameters(), *(head.parameters() if head is not None else ())} - not_used
    down_biases = sum(m.down_proj_bias.numel() for m in used if m.has_bias)
    assert found.weights == sum(p.numel() for p in whole)
    assert found.other_numbers >= down_biases  # they are the backbone's


@pytest.mark.parametrize(
    ("family", "kept"),
    [
        ("qwen3_next", ((2, 16), (2, 16))),
        ("deepseek_v3", ((1, 40),)),  # latents and rotary keys
        ("minimax_m3_vl", ((2, 16), (2, 16), (1, 16))),  # the last is an indexer's
    ],
)
def test_streams_of_the_last_layer_with_a_cache(family: str, kept: tuple[tuple[int, int], ...]) -> None:
    found = described(config_of(family))
    assert [streams for streams in found.kv_streams if streams][-1] == kept
    assert found.kv_numbers_per_token == sum(a * b for layer in found.kv_streams for a, b in layer)


def test_recurrent_layers_keep_states_whatever_the_length() -> None:
    found = described(config_of("qwen3_next"))
    assert found.kv_streams[0] == ()
    assert found.state_shapes[0] == ((128, 4), (4, 16, 16))  # 2 * 2 * 16 + 4 * 16 channels of the convolution
    recurrent = sum(bool(layer) for layer in found.state_shapes)
    assert found.state_numbers == recurrent * (128 * 4 + 4 * 16 * 16)


GELU = Glu(GELU_ALPHA, GELU_CUBIC)
KINDS = {
    "mixtral": SWIGLU,
    "gemma4": ExpertMath(GELU),
    "gpt_oss": ExpertMath(Glu(1.702, gate_max=7.0, up_limit=7.0, offset=1.0), bias=True),
    "deepseek_v4": ExpertMath(Glu(gate_max=10.0, up_limit=10.0)),
    "inkling2": ExpertMath(Glu(gate_softcap=4.0, up_softcap=25.0)),
    "nemotron_h": ExpertMath(Relu2()),
}


def experts_of(family: str, **changes: Any) -> nn.Module:
    model = without_memory(*decoder_of(config_of(family, **changes)))
    return next(iter(experts_used(model).values()))


@pytest.mark.parametrize("family", KINDS)
def test_what_experts_compute_is_found_by_evaluating_them(family: str) -> None:
    assert found_math(experts_of(family)) == KINDS[family]


@pytest.mark.parametrize(
    "changed",
    [
        lambda g: g * torch.sigmoid(1.01 * g),  # near SiLU
        lambda g: nn.functional.gelu(g),  # by the error function, up to 5e-4 from the tanh form
        torch.tanh,
    ],
)
def test_unknown_math_is_refused_and_never_guessed(changed: Callable[[Any], Any]) -> None:
    module: Any = experts_of("mixtral")
    del module.act_fn  # a module, which takes no function
    module.act_fn = changed
    expect_error(
        ModelError, found_math, module, match="no kind of experts that is known computes what Mixtral"
    )


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"model_type": "no_such"}, r"'no_such' is unknown to transformers 5\..*pip install -U transformers"),
        ({}, "model_type None is unknown"),
        ({"model_type": "llama", "num_hidden_layers": 2}, "llama has no routed experts"),
        ({"model_type": "diffusion_gemma"}, "diffusion_gemma is no decoder of text that generates"),
        ({"model_type": "openai_privacy_filter"}, "openai_privacy_filter is no decoder of text"),
        ({"model_type": "t5"}, "t5 is no decoder of text"),
        ({"model_type": "llama4", "text_config": {"num_hidden_layers": 2}}, r"itself \(Llama4TextExperts\)"),
        ({"model_type": "jetmoe", "num_hidden_layers": 2}, "jetmoe computes its experts itself"),
        ({"model_type": "longcat_flash", "num_layers": 2}, "longcat_flash computes its experts itself"),
        ({"model_type": "doge", "num_hidden_layers": 2, "is_moe": True}, "doge computes its experts itself"),
        (
            {"model_type": "muse_spark", "text_config": {"num_hidden_layers": 6}},
            "expert's output is normalised",
        ),
        (config_of("deepseek_v4"), "keeps the cache in a way of its own"),
        (config_of("granitemoe", vocab_size=3), "a vocabulary of 3 tokens makes no sense"),
        (config_of("granitemoe", max_position_embeddings=-1), "-1 positions make no sense"),
        ({"model_type": "gpt_oss", "hidden_size": "wide"}, "cannot read this config: .*hidden_size"),
        (
            {"model_type": "gpt_oss", "num_hidden_layers": 10_001, "layer_types": None},
            "10001 layers make no sense",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_line(config: dict[str, Any], match: str) -> None:
    expect_error(ModelError, described, config, match=match)


def test_texts_beyond_those_of_the_training_are_refused_where_they_change_the_rotations() -> None:
    """Keys that are cached with the frequencies of short texts are wrong in long ones."""
    rope = {
        **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64},
        **{"short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
    }
    assert described(config_of("granitemoe", rope_parameters=rope)).max_positions == 64


def test_a_description_is_kept_by_config_and_version(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("granitemoe")
    assert config["model_type"] not in ARCHITECTURES
    first = facts_of(config)
    facts._described.cache_clear()  # as in another process
    assert facts_of(config) == first == described(config)
    assert len(asked) == 1
    facts_of(config | {"num_experts_per_tok": 3})
    assert len(asked) == 2
    monkeypatch.setattr(facts, "version", lambda name: "99")
    facts._described.cache_clear()
    facts_of(config)
    assert len(asked) == 3


def test_a_config_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever transformers would make of it: beyond its limit the child's allocations fail, in one line."""
    code = "from pipeline.generic import describe as d; d.decoder_of = lambda _: bytearray(5 << 30); d.main()"

    def run(_: list[str], *, input: bytes, env: dict[str, str], **options: Any) -> SimpleNamespace:
        pipe = subprocess.PIPE
        with ForkedPython("-c", code, stdin=pipe, stdout=pipe, stderr=pipe, env=env) as child:
            out, err = child.communicate(input.decode(), options["timeout"])
        return SimpleNamespace(returncode=child.returncode, stdout=out.encode(), stderr=err.encode())

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(facts, "subprocess", SimpleNamespace(run=run, TimeoutExpired=TimeoutError))
    with pytest.raises(ModelError, match=r"cannot describe this model: MemoryError$"):
        facts_of({"model_type": "granitemoe"})


def test_a_damaged_file_is_asked_for_again(asked: list[Any], tmp_path: Path) -> None:
    config = config_of("granitemoe")
    wanted = facts_of(config)
    (path,) = (tmp_path / "tandem" / facts.FOLDER).iterdir()
    assert [(entry.kind, entry.path) for entry in scan(tmp_path / "tandem") if entry.on_disk] == [
        ("facts", path)
    ]
    for content in (b"", b"{}", b'{"facts": {"backbone": 3, "math": {}}}'):
        path.write_bytes(content)
        facts._described.cache_clear()
        assert facts_of(config) == wanted
    assert len(asked) == 4


def test_an_own_family_is_described_by_its_spec(asked: list[Any]) -> None:
    """And transformers says the same."""
    config = config_of("mixtral")
    own, found = facts_of(config), described(config)
    assert not asked
    for name in ("layers", "moe_layers", "hidden", "intermediate", "experts", "top_k", "math", "kv_streams"):
        assert getattr(own, name) == getattr(found, name), name
    assert (own.weights, own.vocabulary, own.max_positions) == (found.weights, found.vocabulary, 256)


def test_the_child_process_answers_and_headers_that_lack_a_tensor_are_refused() -> None:
    config = config_of("granitemoe")
    model = without_memory(*decoder_of(config))
    headers = {name: ("BF16", tuple(t.shape)) for name, t in model.state_dict().items()}
    answer = facts._ask(facts._question(config, headers=headers))
    assert facts._unpack(answer) == described(config)
    missing = "model.layers.1.self_attn.q_proj.weight"
    del headers[missing]
    match = f"no tensor gives the parameter {missing}"
    expect_error(ModelError, check_headers, model, headers, match=match)


def test_numbers_of_matrices_and_others_are_all_of_the_backbone() -> None:
    found = described(config_of("gpt_oss"))
    numbers = {kind: 0 for kind in ("matrix", "dense", "float32")}
    for kind, shape, count in found.backbone:
        numbers[kind] += math.prod(shape) * count
    assert numbers["dense"] == 128 * 64  # the embeddings
    # queries, keys, values, outputs of each layer, and the head
    assert numbers["matrix"] == found.layers * (64 * 64 * 2 + 64 * 32 * 2) + 128 * 64
    assert found.matrix_numbers == numbers["matrix"]


def test_what_transformers_doubts_is_a_detail_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    doubting = logging.getLogger("transformers.modeling_rope_utils")
    for level, shown in ((logging.WARNING, set()), (logging.INFO, {"a paragraph"})):
        caplog.set_level(level)
        caplog.clear()
        to_own_log()
        doubting.warning("a paragraph")
        assert {*caplog.messages} == shown
    assert logging.getLogger("transformers").propagate
