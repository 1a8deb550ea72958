"""The models of the comparisons can show a mistake: every option and every tensor of them changes
transformers' own log-probabilities, and transformers reads its files again in the intended form.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from families import ALWAYS_FUSED, Case, alternatives, build, empty, logprobs, save, texts
from family_cases import CASES
from oracle import Oracle
from safetensors import safe_open

ROUNDING = 1e-5
# Of the cases and of transformers, neither of which a change of the program touches.
pytestmark = pytest.mark.slow
SEEN = 0.1  # nats that a change must move some log-probability by: a thousand times what engines may differ


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_option_changes_what_is_computed(case: Case) -> None:
    model = build(case)
    plain = [logprobs(model, tokens) for tokens in texts(case)]
    tested = set()
    for name, config in alternatives(case):
        changed = empty(case.family, config)
        missing = changed.load_state_dict(model.state_dict(), strict=False).missing_keys
        if missing:
            continue  # a reader that gets it wrong asks for tensors that are not there
        pairs = zip(texts(case), plain, strict=True)
        most = max(float((logprobs(changed, tokens) - before).abs().max()) for tokens, before in pairs)
        assert most < ROUNDING if name in case.silent else most > SEEN, (name, most)
        tested.add(name)
    assert case.silent <= tested


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_tensor_changes_the_result(case: Case) -> None:
    model = build(case)
    torch.manual_seed(case.seed)
    tokens = torch.tensor([texts(case)[1]])
    rows = torch.log_softmax(model(tokens).logits[0], -1)
    (rows * torch.randn(rows.shape)).sum().backward()
    unread = [name for name, weight in model.named_parameters() if not weight.grad.abs().max() > 1e-2]
    assert not unread


@pytest.mark.parametrize("case", CASES, ids=str)
def test_transformers_reads_what_it_wrote(case: Case, tmp_path: Path) -> None:
    save(case, tmp_path)
    names, dtypes = set(), set()
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == case.shards
    for path in files:
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
            dtypes |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    fused = case.fused or case.family in ALWAYS_FUSED
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in names) == fused
    assert any(".experts.0." in name for name in names) != fused
    assert ("lm_head.weight" in names) != case.config["tie_word_embeddings"]
    assert dtypes == {{torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[case.dtype]}
    assert json.loads((tmp_path / "config.json").read_bytes())["model_type"] == case.family
    model, again = build(case), Oracle(tmp_path, torch.float32)
    for tokens in texts(case):
        np.testing.assert_allclose(again.logprobs(tokens), logprobs(model, tokens), rtol=0, atol=1e-5)
