"""Computes every figure of the model's card from the exported weights, with transformers in float32."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.embedded_model.batches import DIALOGUE_SHARE, read_tokens
from benchmarks.embedded_model.bigram import Bigram
from benchmarks.embedded_model.card import render
from benchmarks.embedded_model.routing import (
    Trace,
    counts,
    jensen_shannon,
    next_gate_accuracy,
    phase_similarity,
    total_variation,
    trace,
)
from benchmarks.embedded_model.sources import KINDS, LICENCES
from pipeline.assets import heldout, model_dir

WINDOW = 512  # tokens; the first of each window is context only
PROMPT, CONTINUATION, PROMPTS = 128, 128, 4  # tokens, tokens, and prompts per kind
FIRST = 6  # rows for which the tests recompute the loss
DEMO = ("What is a generator?", "What is an iterator?", "What does ls do?", "Was macht ls?")


def windows(tokenizer: Tokenizer, text: str, length: int = WINDOW) -> torch.Tensor:
    """The text's tokens, without special ones, as (rows, length); a shorter remainder is dropped."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    rows = len(ids) // length
    return torch.tensor(ids[: rows * length]).view(rows, length)


def text_loss(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """Mean nats a token, of every token but each row's first; tokens (rows, length)."""
    return float(F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))


def _joined(traces: list[Trace]) -> Trace:
    inputs = torch.cat([found.inputs for found in traces], dim=1)
    return Trace(torch.zeros(0), inputs, torch.cat([found.chosen for found in traces], dim=1))


def _rounded(values: torch.Tensor, digits: int = 4) -> list[Any]:
    return [_rounded(v, digits) if v.ndim else round(float(v), digits) for v in values]


def losses(model: Any, tokenizer: Tokenizer, corpus: Path) -> tuple[dict[str, Any], dict[str, list[Trace]]]:
    """Held-out losses of the model and of the bigram models, and each kind's two half traces."""
    streams = {kind: read_tokens(corpus, kind) for kind in KINDS}
    everything = Bigram(list(streams.values()))
    figures: dict[str, Any] = {}
    halves: dict[str, list[Trace]] = {}
    for kind in KINDS:
        tokens = windows(tokenizer, heldout()[kind].read_text(encoding="utf-8"))
        found = trace(model, tokens)
        pairs = tokens[:, :-1].flatten().numpy(), tokens[:, 1:].flatten().numpy()
        bigram, smoothing = everything.best(*pairs)
        own, own_smoothing = Bigram([streams[kind]]).best(*pairs)
        model_loss = text_loss(found.logits, tokens)
        figures[kind] = {
            "tokens": int(tokens.numel()),
            "model": round(model_loss, 4),
            "model_first_rows": round(text_loss(found.logits[:FIRST], tokens[:FIRST]), 4),
            "bigram": round(bigram, 4),
            "bigram_smoothing": smoothing,
            "gain": round(bigram - model_loss, 4),
            "own_kind_bigram": round(own, 4),
            "own_kind_bigram_smoothing": own_smoothing,
            "own_kind_gain": round(own - model_loss, 4),
            "training_tokens": int(streams[kind].size),
        }
        middle = tokens.shape[0] // 2 * WINDOW
        halves[kind] = [
            Trace(torch.zeros(0), found.inputs[:, part], found.chosen[:, part])
            for part in (slice(0, middle), slice(middle, None))
        ]
    return figures, halves


def routing(model: Any, halves: dict[str, list[Trace]]) -> dict[str, Any]:
    """Expert shares, their differences between kinds, and next-gate accuracy."""
    experts = model.config.num_local_experts
    by_kind = torch.stack([counts(_joined(halves[kind]).chosen, experts) for kind in KINDS])
    shares = by_kind / by_kind.sum(-1, keepdim=True)
    pooled = by_kind.sum(0) / by_kind.sum((0, 2)).unsqueeze(-1)
    calibration = _joined([halves[kind][0] for kind in KINDS])
    judged = _joined([halves[kind][1] for kind in KINDS])
    raw, corrected = next_gate_accuracy(model, calibration, judged)
    return {
        "shares": _rounded(pooled),
        "smallest_share": round(float(pooled.min()), 4),
        "largest_share": round(float(pooled.max()), 4),
        "shares_by_kind": {kind: _rounded(shares[i]) for i, kind in enumerate(KINDS)},
        "total_variation": _rounded(total_variation(shares)),
        "jensen_shannon_bits": _rounded(jensen_shannon(shares)),
        "next_gate_raw": [round(value, 4) for value in raw],
        "next_gate_corrected": [round(value, 4) for value in corrected],
    }


def phases(model: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    """Cosine similarity of prefill and decode activation, by kind, sampled and greedy."""
    figures: dict[str, Any] = {}
    for name, temperature in (("sampled", 0.8), ("greedy", 0.0)):
        torch.manual_seed(11)
        prompts = []
        for kind in KINDS:
            rows = windows(tokenizer, heldout()[kind].read_text(encoding="utf-8"), PROMPT)
            prompts.append(rows[:: max(1, rows.shape[0] // PROMPTS)][:PROMPTS])
        found = phase_similarity(model, torch.cat(prompts), CONTINUATION, temperature)
        by_kind = found.view(len(KINDS), -1).mean(1)
        figures[name] = {kind: round(float(value), 4) for kind, value in zip(KINDS, by_kind, strict=True)}
        figures[name]["mean"] = round(float(found.mean()), 4)
    return figures


def mixture(run: Path) -> list[dict[str, Any]]:
    """The stretches of a run in which the kinds' shares of the rows stayed the same, from its log."""
    stretches: list[dict[str, Any]] = []
    for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if "weights" not in entry:
            continue
        total = sum(entry["weights"].values())
        dialogues = entry.get("dialogue_share", DIALOGUE_SHARE)
        shares = {kind: round((1 - dialogues) * w / total, 4) for kind, w in entry["weights"].items()}
        shares["dialogues"] = dialogues
        stretch = {"until_minute": entry["minutes"], "until_tokens": entry["tokens"], "shares": shares}
        if stretches and stretches[-1]["shares"] == shares:
            stretches[-1] = stretch
        else:
            stretches.append(stretch)
    return stretches


def seen(stretches: list[dict[str, Any]]) -> dict[str, int]:
    """The approximate number of tokens of each kind that the run was trained on."""
    found, before = dict.fromkeys((*KINDS, "dialogues"), 0.0), 0
    for stretch in stretches:
        for kind in found:
            found[kind] += (stretch["until_tokens"] - before) * stretch["shares"][kind]
        before = stretch["until_tokens"]
    return {kind: round(tokens) for kind, tokens in found.items()}


def answers(model: Any, chat: Any) -> dict[str, str]:
    """Greedy answers to the demonstration's questions."""
    found = {}
    for question in DEMO:
        messages = [{"role": "user", "content": question}]
        form = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        prompt = chat.apply_chat_template(messages, **form)
        full = model.generate(**prompt, max_new_tokens=160, do_sample=False)
        found[question] = chat.decode(full[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return found


def main() -> None:
    """Command line: `python -m benchmarks.embedded_model.evaluate --corpus DIR --run DIR`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True, help="the training run's output, for its run.json")
    parser.add_argument("--model", type=Path, default=model_dir())
    parser.add_argument("--out", type=Path, default=model_dir().parent, help="of card.json and CARD.md")
    parser.add_argument("--machine", required=True, help="the machine of the training run, for the card")
    parser.add_argument("--remarks", default="", help="sentences about the run, for the card")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.eval()
    figures, halves = losses(model, tokenizer, args.corpus)
    stretches = mixture(args.run)
    card = {
        "training": json.loads((args.run / "run.json").read_text(encoding="utf-8")),
        "mixture": stretches,
        "seen_tokens": seen(stretches),
        "trained_on": args.machine,
        "remarks": args.remarks,
        "parameters": sum(p.numel() for p in model.parameters()),
        "data": json.loads((args.corpus / "sources.json").read_text(encoding="utf-8")),
        "licences": LICENCES,
        "heldout": figures,
        "smallest_gain": min(figure["gain"] for figure in figures.values()),
        "routing": routing(model, halves),
        "phase_similarity": phases(model, tokenizer),
        "answers": answers(model, AutoTokenizer.from_pretrained(args.model)),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    figures_text = json.dumps(card, indent=1, ensure_ascii=False) + "\n"
    (args.out / "card.json").write_text(figures_text, encoding="utf-8")
    (args.out / "CARD.md").write_text(render(card), encoding="utf-8")
    print(json.dumps({k: card[k] for k in ("heldout", "routing", "phase_similarity", "answers")}, indent=1))


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    main()
