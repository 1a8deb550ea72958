"""A running engine whose costs say that whole layers are faster: the cache is rearranged between two tokens,
and the logits stay those of the host alone. Workers and prefetcher are threads of this process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from thread_engine import PROMPT, TOKEN, engine_in_threads

from pipeline.arrays import FloatArray
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_cache import KVCache
from pipeline.engine.engine import Engine
from pipeline.policies.costs import Costs
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from pipeline.policies.whole_layers import WINDOW

# A layer of both sides takes longer than one side does with all of it.
COSTS = Costs((1,), (2e-3,), (1e-4,), 1e-2, 1e-4, launch=1e-4, fetch=1e-2, both=2e-2)
TOKENS = WINDOW + 8
WHOLE = 12  # tiles of a layer's experts


def logits(engine: Engine, policy: str, costs: Costs | None) -> FloatArray:
    """Of TOKENS steps, [TOKENS, vocabulary]."""
    kv = KVCache(engine.backbone.spec, torch.float32, torch.device("cpu"), 256)
    engine.set_policy(make_policy(PolicyRequest(policy), 0), costs)
    sequence = kv.allocate(128)
    engine.step([StepInput(TokenSpan(sequence, PROMPT), "none")], "prefill")
    found = []
    for step in range(TOKENS):
        (rows,) = engine.step([StepInput(TokenSpan(sequence, [TOKEN + step]), "last")], "decode")
        found.append(rows[0])
    return np.stack(found)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_whole_layers_are_moved_to_the_device_and_change_no_logits(tiny_model, tmp_path) -> None:
    with engine_in_threads(tiny_model, tmp_path, capacity=WHOLE + 2) as (engine, _):
        expected = logits(engine, "all-host", None)
        assert np.allclose(logits(engine, "tandem", COSTS), expected, rtol=1e-3, atol=1e-3)
        assert engine.driver.placement.sum(axis=1).tolist() != [WHOLE, 2], "at first"
        assert engine.memory.mover.wait_idle()
        assert engine.memory.residency.sum(axis=1).tolist() == [WHOLE, 2]
