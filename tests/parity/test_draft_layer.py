"""A checkpoint's layer that drafts: its guesses are those of transformers' module, and change no token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import Case, build, save, save_with_draft_layer
from mover_parts import model_store
from test_scheduler import Harness
from test_speculation import GREEDY, SAMPLED, same
from thread_engine import engine_in_threads
from transformers.cache_utils import MtpCache

from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.draft_layer import DraftLayer
from pipeline.backbone.kv_cache import KVCache
from pipeline.backbone.linear import Precision
from pipeline.checkpoint.open import open_model
from pipeline.config import DRAFT_TOKENS
from pipeline.engine.drafter import Drafter
from pipeline.models.facts import expert_shape
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from shm.layout import format_named

FAMILIES = ["glm4_moe", "glm4_moe_lite", "deepseek_v3"]
TOKENS = [7, 90, 4, 55, 201, 8, 33, 120, 64, 5, 5, 17]

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


@contextmanager
def drafting(folder: Path, recent: int = 16) -> Iterator[tuple[Any, Drafter]]:
    """An engine on a checkpoint, with its layer."""
    source = open_model(folder)
    shape = expert_shape(source.config, 32, format_named("f32"))
    with model_store(shape, source) as store, engine_in_threads(folder, folder, store=store) as (engine, _):
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
            made, last = drafter.step([TokenSpan(sequence, TOKENS[first + 1 : end + 1])], engine.hidden[first:end])
            torch.testing.assert_close(last[0], expected[end - 1], rtol=1e-4, atol=1e-4)
            assert made == [guesses[end - 1]]
