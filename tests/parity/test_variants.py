"""Variants of Mixtral's config, saved by transformers itself in shards, equal transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import Oracle
from transformers import MixtralConfig, MixtralForCausalLM

from pipeline.config import EngineConfig

PLAIN = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def save(changes: dict[str, object], folder: Path) -> None:
    """A model with random weights in several files."""
    torch.manual_seed(3)
    model = MixtralForCausalLM(MixtralConfig(**(PLAIN | changes)))
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"sliding_window": 16}, id="sliding-window"),
        pytest.param({"head_dim": 20, "num_key_value_heads": 6}, id="wide-heads"),
        pytest.param({"num_experts_per_tok": 3, "tie_word_embeddings": True}, id="top-3-tied"),
        pytest.param({"num_local_experts": 1, "num_experts_per_tok": 1}, id="one-expert"),
    ],
)
async def test_a_variant_equals_transformers(changes, start_engine, tmp_path: Path) -> None:
    save(changes, tmp_path)
    tokens = tuple(int(t) for t in torch.randint(300, (90,)))
    expected = Oracle(tmp_path, torch.float32).logprobs(tokens)
    config = EngineConfig(
        model=tmp_path, format="f32", backbone_dtype="f32", tile=24, chunk=20, expert_cache=0.3, workers=2
    )
    async with start_engine(config) as (_, client):
        for policy in ("all-host", "random"):
            await client.set_policy(policy, {})
            for stepwise in (False, True):
                blocks = client.score(token_ids=tokens, full=True, stepwise=stepwise, prefill=30)
                ours = np.concatenate([block.logprobs async for block in blocks])
                np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=0, err_msg=f"{policy} {stepwise}")
