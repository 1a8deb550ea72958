"""An approximate policy acts on the routers and experts of every kind, against arithmetic written out."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from families import Case, Options, save
from mover_parts import attached_again
from safetensors.numpy import load_file
from thread_engine import TOKEN, Placed, engine_in_threads, prefilled
from tiny_families import described, tiny_model
from torch import Tensor

from pipeline.arrays import FloatArray
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_cache import KVCache
from pipeline.backbone.protocol import LayerCall
from pipeline.models import facts
from pipeline.policies.view import Ahead, Gated, Routing, Signals, View
from shm.store import Store
from workers.kernels.reference import ReferenceKernel

CUT, TILES = 1, 2  # tiles that the device computes in the layer that is decided ahead; of an expert
K, GROUPS, SCALE = 3, 2, 1.4  # experts of a token; groups, of which the best is used; factor of weights
SOFTMAX: Options = {"num_experts_per_tok": K, "norm_topk_prob": True}
SIGMOID = SOFTMAX | {"n_routed_experts": 8, "routed_scaling_factor": SCALE}
OWN = {"qwen3_moe": SOFTMAX, "gpt_oss": SOFTMAX, "glm4_moe": SIGMOID, "deepseek_v3": SIGMOID}
Row = dict[int, float]  # the weights of a token's experts, the best first


class SkipThenPredict(Placed):
    """Layer 0 skips each row's weakest expert. Layer 1 is decided by its router on layer 0's x, with another
    expert in place of the last, the first that the row does not use. The host begins with that x."""

    name = "skip-then-predict"
    exact = False
    experts = (0, 1)

    def probes(self, layer: int, view: View) -> tuple[int, ...]:
        return (1,) if layer == 0 else ()

    def gate(self, layer: int, signals: Signals, view: View) -> Gated:
        gated = super().gate(layer, signals, view)
        if layer != 0:
            return gated
        weights = gated.routing.weights
        kept = np.where(weights == weights.min(axis=1, keepdims=True), np.float32(0), weights)
        kept *= weights.sum(axis=1, keepdims=True) / kept.sum(axis=1, keepdims=True)
        return Gated(Routing(gated.routing.experts, kept), gated.routing)

    def ahead(self, layer: int, signals: Signals, view: View) -> Ahead | None:
        if layer != 0 or view.router is None:
            return None
        predicted = view.router(signals.probes[1], 1)
        experts = predicted.experts.copy()
        experts[:, -1] = [min({*range(K + 1)} - {*row.tolist()}) for row in experts]
        changed = Routing(experts, view.router.weights_of(signals.probes[1], experts, 1))
        return Ahead(Gated(changed, predicted, predicted=True), np.full(view.shape.experts, CUT, np.int32))


class ByHand:
    """The experts of a step as that policy wants them, from a backbone's calls, row by row."""

    def __init__(self, family: str, folder: Path, layers: tuple[int, ...], store: Store) -> None:
        """`layers`: those of the model in `folder` that have experts."""
        self.family, self.grouped = family, OWN.get(family) is SIGMOID
        self.layers, self.store = [f"model.layers.{layer}" for layer in layers], store
        self.tensors: dict[str, FloatArray] = load_file(folder / "model.safetensors")
        self.counted: defaultdict[str, float] = defaultdict(float)  # as the counters name it

    def __call__(self, call: LayerCall) -> Tensor:
        call.attend(call.layer != 1, ())
        x, *logits = (read.copy() for read in call.read())
        device = host = torch.from_numpy(x)
        rows = [self.routed(row, call.layer) for row in logits[0]] if logits else []
        if call.layer == 0:
            rows = [self.without_weakest(row) for row in rows]
            self.before = host, [self.predicted(row) for row in self.probe(x)]
        elif call.layer == 1:
            host, rows = self.before
        y, kernel = torch.zeros_like(device), ReferenceKernel(self.store.layout)
        for place, row in enumerate(rows):
            for expert, weight in row.items():
                for lo, hi, read in ((0, CUT, device), (CUT, TILES, host)):
                    tiles = torch.from_numpy(self.store.tiles(call.layer, expert, lo, hi).copy())
                    y[place] += weight * kernel.compute(tiles, read, torch.tensor([place]))[0]
                if self.family == "gpt_oss":
                    bias = self.tensors[f"{self.layers[call.layer]}.mlp.experts.down_proj_bias"]
                    y[place] += weight * torch.from_numpy(bias[expert])
        return y if (shared := call.shared()) is None else y + shared

    def probe(self, x: FloatArray) -> FloatArray:
        """The logits of layer 1's router for layer 0's x [R, H]."""
        first, second, *_ = self.layers
        if self.family != "gemma4":
            router = f"{second}.mlp.{'router' if self.family == 'gpt_oss' else 'gate'}"
            return x @ self.tensors[f"{router}.weight"].T + self.tensors.get(f"{router}.bias", np.float32(0))
        x = x / self.tensors[f"{first}.pre_feedforward_layernorm_2.weight"]  # the router reads what is normed
        x *= self.tensors[f"{second}.router.scale"] / np.sqrt((x * x).sum(axis=1, keepdims=True))
        return x @ self.tensors[f"{second}.router.proj.weight"].T

    def without_weakest(self, row: Row) -> Row:
        self.counted["skipped"] += (least := min(row.values()))
        factor = sum(row.values()) / (sum(row.values()) - least)
        return {e: w * factor for e, w in row.items() if w != least}

    def predicted(self, logits: FloatArray) -> Row:
        *kept, last = row = self.routed(logits, 1)
        done = self.weights(logits, [*kept, min({*range(K + 1)} - row.keys())], 1)
        self.counted["predicted"] += sum(row.values())
        self.counted["substituted"] += row[last]
        self.counted["stale"] += sum(done.values()) * (1 - CUT / TILES)
        return done

    def routed(self, logits: FloatArray, layer: int) -> Row:
        asked = logits
        if self.grouped:
            bias = self.tensors[f"{self.layers[layer]}.mlp.gate.e_score_correction_bias"]
            groups = (1 / (1 + np.exp(-logits)) + bias).reshape(GROUPS, -1)
            best = np.sort(groups)[:, -2:].sum(axis=1).argmax()
            asked = np.where(np.arange(GROUPS)[:, None] == best, groups, -np.float32(np.inf)).ravel()
        return self.weights(logits, np.argsort(-asked)[:K].tolist(), layer)

    def weights(self, logits: FloatArray, experts: list[int], layer: int) -> Row:
        # Softmax over these alone is what softmax over all is, rescaled.
        scores = 1 / (1 + np.exp(-logits[experts])) if self.grouped else np.exp(logits[experts])
        weights = scores / scores.sum() * (SCALE if self.grouped else 1)
        if self.family == "gemma4":
            weights = weights * self.tensors[f"{self.layers[layer]}.router.per_expert_scale"][experts]
        return dict(zip(experts, weights.tolist(), strict=True))


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("family", [*OWN, "gemma4"])
def test_approximations_act(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step of two sequences; the layers after the second are exact."""
    if family in OWN:
        save(Case(family, "", OWN[family], shards=False), tmp_path)
    else:
        monkeypatch.setattr(facts, "_ask", described)
        model = tiny_model(family, top_k_experts=K)
        for name, factors in model.named_parameters():
            if name.endswith(("scale", "norm_2.weight")):
                torch.nn.init.uniform_(factors, 0.5, 1.5)
        model.save_pretrained(tmp_path)
    with engine_in_threads(tmp_path, tmp_path) as (engine, _), attached_again("thread_engine") as store:
        backbone = engine.backbone
        kv = KVCache(backbone.facts, torch.float32, torch.device("cpu"), 1024)
        spans = [TokenSpan(prefilled(engine, kv).kv, [token]) for token in (TOKEN, TOKEN + 1)]
        inputs = [StepInput(span, "last") for span in spans]
        hand = ByHand(family, tmp_path, backbone.facts.moe_layers, store)
        with torch.inference_mode():
            step = backbone.step(spans, backbone.router)
            step.run(hand)
            expected = step.answers(inputs)
        engine.set_policy(SkipThenPredict(), None)
        logits = engine.step(inputs, "decode")
        counted = engine.counters.snapshot()["decode"]["fidelity"]
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-5)
    assert {kind: counted[kind] for kind in hand.counted} == pytest.approx(hand.counted, abs=1e-5)
