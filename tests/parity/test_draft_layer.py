"""A checkpoint's layer that drafts: its guesses are those of transformers' module, and change no token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import packers
import pytest
import torch
from counting_gpu import counting_device
from families import Case, add_draft_layer, build, draft_layer, save, save_with_draft_layer
from mover_parts import model_store
from packers import Packing
from safetensors.torch import load_file, save_file
from test_quantized_checkpoints import EVEN, quantize
from test_scheduler import Harness
from test_speculation import GREEDY, SAMPLED, same
from thread_engine import engine_in_threads
from transformers.cache_utils import MtpCache

from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.draft_layer import DraftLayer
from pipeline.backbone.kv_blocks import BlockPool
from pipeline.backbone.kv_cache import KVCache, SequenceKV
from pipeline.backbone.linear import Precision
from pipeline.checkpoint.open import open_model
from pipeline.config import DRAFT_TOKENS, KV_BLOCK, EngineConfig
from pipeline.device.base import Device
from pipeline.engine.drafter import Drafter
from pipeline.errors import ShardFailed
from pipeline.memory.needs import needs
from pipeline.models.config_keys import DRAFTS
from pipeline.models.facts import expert_shape, facts_of
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from pipeline.scheduling import speculation
from pipeline.scheduling.jobs import Job
from pipeline.scheduling.layer_drafts import LayerDrafts, Tail
from pipeline.scheduling.suspects import key_of
from protocol.messages import Generate
from shm.layout import format_named

FAMILIES = ["glm4_moe", "glm4_moe_lite", "deepseek_v3"]
TOKENS = [7, 90, 4, 55, 201, 8, 33, 120, 64, 5, 5, 17]

PACKINGS = [packers.awq(32, "int4-f16-g32"), packers.modelopt_nvfp4()]

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


@contextmanager
def drafting(folder: Path, recent: int = 16, device: Device | None = None) -> Iterator[tuple[Any, Drafter]]:
    """An engine on a checkpoint, with its layer."""
    source = open_model(folder)
    name = source.own_format or "f32"
    shape = expert_shape(source.config, 32, format_named(name))
    with (
        model_store(shape, source, name) as store,
        engine_in_threads(folder, folder, store=store, device=device) as (engine, _),
    ):
        engine.set_policy(make_policy(PolicyRequest("all-host", {}), 1), None)
        precision = Precision("f32", engine.device)
        layer = DraftLayer(engine.backbone, source, precision, DRAFT_TOKENS)
        yield engine, Drafter(engine, layer, recent)


@pytest.mark.parametrize("family", FAMILIES)
def test_guesses_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    case = Case(family, "plain")
    mtp, model = save_with_draft_layer(case, tmp_path), build(case)
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states[-1]
        positions = torch.arange(1, len(TOKENS))[None]
        cache = MtpCache(config=mtp.config)
        expected = mtp.forward_layer(0, hidden[:, :-1], positions, cache, input_ids=ids[:, 1:])[0]
        guesses = mtp._project_to_logits(expected).argmax(-1).tolist()
    with drafting(tmp_path) as (engine, drafter):
        kv = KVCache(engine.backbone.facts, torch.float32, torch.device("cpu"), 64).allocate(64)
        engine.step([StepInput(TokenSpan(kv, TOKENS), "none")], "prefill")
        torch.testing.assert_close(engine.hidden, hidden[0], rtol=1e-4, atol=1e-4)
        sequence = drafter.kv.allocate(64)
        for first, end in ((0, 6), (6, 7), (7, 11)):  # in parts, of one and of several rows
            made, last = drafter.step(
                [TokenSpan(sequence, TOKENS[first + 1 : end + 1])], engine.hidden[first:end]
            )
            torch.testing.assert_close(last[0], expected[end - 1], rtol=1e-4, atol=1e-4)
            assert made == [guesses[end - 1]]


class Mixed(LayerDrafts):
    """The known answer with some tokens wrong, in place of what the layer guesses, of which the first guesses
    are kept."""

    def __init__(self, drafter: Drafter, answer: list[int]) -> None:
        super().__init__(drafter)
        self._answer = answer
        self.own: dict[int, int] = {}  # by the tokens before

    def draft(self, numbers: dict[Job, int]) -> dict[Job, list[int]]:
        made = super().draft(numbers)
        for job, guesses in made.items():
            self.own[len(job.tokens)] = guesses[0]
            for depth in range(len(guesses)):
                at = len(job.tokens) + depth
                guesses[depth] = (self._answer[at] + (at % 5 in (0, 3))) % 300
        return made


def test_layer_sees_what_was_accepted_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind right and wrong guesses of its own, it guesses what transformers does of the same text."""
    case = Case("glm4_moe", "plain")
    mtp, model = save_with_draft_layer(case, tmp_path), build(case)
    message = Generate(0, token_ids=tuple(TOKENS), max_tokens=30, ignore_eos=True)
    with drafting(tmp_path, recent=64) as (engine, drafter):
        alone = Harness(engine)
        alone.run(b"c", message)
        answer = TOKENS + [token.token for token in alone.answer(0)[0]]
        made: list[Mixed] = []

        def mixed(drafter: Drafter) -> Mixed:
            made.append(Mixed(drafter, [*answer, 0]))
            return made[0]

        monkeypatch.setattr(speculation, "LayerDrafts", mixed)
        harness = Harness(engine, speculate=3, drafter=drafter)
        harness.run(b"c", message)
        assert same(harness.answer(0)[0], alone.answer(0)[0])
        stats = harness.scheduler.speculation.stats()["sources"]["mtp"]
        assert 0 < stats["accepted"] < stats["drafted"]
        assert drafter.kv.used == 0
    ids = torch.tensor([answer])
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states[-1][:, :-1]
        positions = torch.arange(1, len(answer))[None]
        states = mtp.forward_layer(0, hidden, positions, MtpCache(config=mtp.config), input_ids=ids[:, 1:])
        logits = mtp._project_to_logits(states)[0]
    assert len(made[0].own) > 8
    for tokens, guess in made[0].own.items():
        row = logits[tokens - 2]
        assert row[guess] >= row.max() - 1e-3


@pytest.mark.parametrize("asked", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_layer_changes_no_token(asked: dict[str, Any], tmp_path: Path) -> None:
    """Of requests that share a prefix, and one of which is preempted."""
    save_with_draft_layer(Case("deepseek_v3", "plain"), tmp_path)
    prompt = tuple(np.random.default_rng(3).integers(3, 300, 70).tolist())
    with drafting(tmp_path) as (engine, drafter):
        given = []
        for speculate in ("off", 2):
            harness = Harness(engine, budget=6 * KV_BLOCK, context=126, speculate=speculate, drafter=drafter)
            for request in range(3):
                own = (*prompt[: 66 + request], 9) if request < 2 else prompt[40:]
                message = Generate(request, token_ids=own, max_tokens=50, ignore_eos=True, **asked)
                harness.scheduler.enqueue(b"c", message)
            for _ in range(25):
                harness.scheduler.round()
            harness.scheduler._preempt(harness.scheduler._running[-1])
            harness.finish()
            given.append([harness.answer(request)[0] for request in range(3)])
            harness.check_empty()
        sources = harness.scheduler.speculation.stats()["sources"]
        assert sources["mtp"]["drafted"] > 20
        assert drafter.kv.used == 0
    for tokens, expected in zip(given[1], given[0], strict=True):
        assert same(tokens, expected)


def test_guesses_on_a_gpu_need_no_copy_that_blocks(tmp_path: Path) -> None:
    save_with_draft_layer(Case("deepseek_v3", "plain"), tmp_path)
    with counting_device() as (device, _), drafting(tmp_path, device=device) as (engine, drafter):
        sequences = KVCache(engine.backbone.facts, torch.float32, device.torch_device, 4 * KV_BLOCK)
        drafts, jobs = LayerDrafts(drafter), [MagicMock(tokens=[*TOKENS, token]) for token in (8, 9)]
        for job in jobs:
            inputs = [StepInput(TokenSpan(sequences.allocate(KV_BLOCK), TOKENS), "none")]
            engine.step(inputs, "prefill")
            drafts.keep(job, 0, engine.hidden)
        with device.counted() as counts:
            guesses = drafts.draft({jobs[0]: 1, jobs[1]: 3})
        assert [len(guesses[job]) for job in jobs] == [1, 3]
        assert counts["blocking copies"] == 0
        for job in jobs:
            drafts.forget(job)


def test_layer_that_fails_guesses_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_with_draft_layer(Case("glm4_moe", "plain"), tmp_path)
    message = Generate(0, token_ids=tuple(TOKENS), max_tokens=20, ignore_eos=True)
    with drafting(tmp_path) as (engine, drafter):

        def fail(*arguments: Any) -> Any:
            raise ShardFailed("a worker refused it")

        monkeypatch.setattr(drafter, "_step", fail)
        harness = Harness(engine, speculate=2, drafter=drafter)
        harness.run(b"c", message)
        assert len(harness.answer(0)[0]) == 20
        assert drafter.kv.used == 0


def test_request_whose_guesses_end_the_engine_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_with_draft_layer(Case("glm4_moe", "plain"), tmp_path)
    message = Generate(0, token_ids=tuple(TOKENS), max_tokens=20, ignore_eos=True)
    with drafting(tmp_path) as (engine, drafter):
        monkeypatch.setattr(drafter, "_step", MagicMock(side_effect=MemoryError))
        harness = Harness(engine, speculate=2, drafter=drafter)
        with pytest.raises(MemoryError):
            harness.run(b"c", message)
        assert harness.suspects.requests == [(key_of(message), 0)]


def test_incomplete_layer_is_left_aside(tmp_path: Path) -> None:
    """As where a checkpoint's config counts the layer alone, or a part of it was removed."""
    case = Case("glm4_moe", "plain")
    save_with_draft_layer(case, tmp_path)
    whole = open_model(tmp_path)
    assert facts_of(whole.config).stored_layers == 3
    index = tmp_path / "model.safetensors.index.json"
    listed = json.loads(index.read_bytes())
    tensors = load_file(tmp_path / "draft-3.safetensors")
    for name in [name for name in tensors if name.endswith("experts.5.up_proj.weight")]:
        del tensors[name], listed["weight_map"][name]
    save_file(tensors, tmp_path / "draft-3.safetensors")
    index.write_text(json.dumps(listed))
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {DRAFTS: True}))
    assert facts_of(open_model(tmp_path).config).stored_layers == 2


@pytest.mark.parametrize("packing", [None, PACKINGS[0]], ids=["plain", "packed"])
def test_memory_is_planned_for_the_layer_where_it_is_used(packing: Packing | None, tmp_path: Path) -> None:
    case = Case("glm4_moe", "plain", EVEN, shards=False)
    save(case, tmp_path)
    folder = tmp_path if packing is None else quantize(tmp_path, packing)[0]
    config, name = EngineConfig(device="cpu", workers=1), open_model(folder).own_format or "bf16"
    without = needs(open_model(folder), config, name)
    add_draft_layer(draft_layer(case), 3, folder)
    layer = open_model(folder)
    used = needs(layer, config, name)
    assert used.drafting > 0 == without.drafting
    assert used.backbone > without.backbone
    others: list[dict[str, Any]] = [
        {"speculate": "off"},
        {"record": Path("f")},
        {"device": "cpu:1,cpu:1"},
    ]
    for changes in (*others, {"host_memory": used.whole - 1}):
        found = needs(layer, replace(config, **changes), name)
        assert (found.backbone, found.drafting) == (without.backbone, 0)


def test_first_of_several_layers_is_read(tmp_path: Path) -> None:
    case = Case("glm4_moe", "plain")
    save_with_draft_layer(case, tmp_path)
    add_draft_layer(draft_layer(case), 4, tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    assert facts_of(open_model(tmp_path).config).stored_layers == 3


@pytest.mark.parametrize("packing", PACKINGS, ids=lambda packing: packing.format)
def test_layer_beside_quantized_experts(packing: Packing, tmp_path: Path) -> None:
    """The layer is often not quantized as the model is, whose experts are kept as they are all the same."""
    case = Case("glm4_moe", "plain", EVEN, shards=False)
    save(case, tmp_path)
    folder, _ = quantize(tmp_path, packing)
    add_draft_layer(draft_layer(case), 3, folder)
    source = open_model(folder)
    assert source.own_format == packing.format
    assert not source.worth_keeping(packing.format or "")
    message = Generate(0, token_ids=tuple(TOKENS), max_tokens=20, ignore_eos=True)
    with drafting(folder) as (engine, drafter):
        alone, drafted = Harness(engine), Harness(engine, speculate=2, drafter=drafter)
        for harness in (alone, drafted):
            harness.run(b"c", message)
        assert drafted.scheduler.speculation.stats()["sources"]["mtp"]["drafted"] > 10
        assert same(drafted.answer(0)[0], alone.answer(0)[0])


def test_guesses_are_judged_by_their_depth() -> None:
    """A layer is asked on trial first, and used as often as its guesses come true."""
    drafts = LayerDrafts(cast(Drafter, SimpleNamespace(recent=4)))
    job = MagicMock(tokens=[1])
    assert drafts.due
    for _ in range(60):
        drafts._guessed = {job: (1, [5, 6, 7])}
        job.tokens = [1, 5, 6, 8]
        drafts.judge()
    first, second, third = drafts.chances(3)
    assert drafts.tried
    assert first > second > 0.85
    assert third < 0.2
    assert drafts.chances(0) == []


def test_text_with_a_gap_begins_anew() -> None:
    tail = Tail(4)
    tail.add(0, torch.arange(6.0)[:, None])
    assert tail.end == 6
    assert tail.since(0)[:, 0].tolist() == [2, 3, 4, 5]
    tail.add(6, torch.tensor([[6.0]]))
    assert tail.since(4)[:, 0].tolist() == [4, 5, 6]
    sequence = SequenceKV(BlockPool((), torch.float32, torch.device("cpu"), DRAFT_TOKENS), None, [])
    tail.begin(sequence, 1)
    assert tail.done == 3  # though more are kept
    tail.add(64, torch.tensor([[64.0]]))
    assert tail.end == 65
    assert tail.since(0)[:, 0].tolist() == [64]
