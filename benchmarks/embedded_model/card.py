"""The model's card as Markdown, from the figures of card.json."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.embedded_model.model import Shape
from benchmarks.embedded_model.sources import KINDS


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def _filled(text: str) -> str:
    """The text with its paragraphs filled; tables, headings and quotations stay as they are."""
    blocks = re.split(r"\n{2,}", text.strip())
    plain = (
        block if block[0] in "|#>" else textwrap.fill(block, 110, break_on_hyphens=False) for block in blocks
    )
    return "\n\n".join(plain) + "\n"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _mixture(card: dict[str, Any]) -> str:
    rows = [
        (f"{stretch['until_minute']:.0f}", *(_percent(share) for share in stretch["shares"].values()))
        for stretch in card["mixture"]
    ]
    table = _table(("Until minute", *card["mixture"][0]["shares"]), rows)
    return f"""Shares of the training rows, moved along the way to the kinds with a held-out loss least
below the bigram model's:

{table}"""


def _training(card: dict[str, Any]) -> str:
    run, data, shape = card["training"], card["data"], Shape()
    talks = data["dialogues"]
    rows = [
        (
            kind,
            data[kind]["training_documents"],
            f"{data[kind]['training_characters'] / 1e6:.2f} M",
            f"{card['heldout'][kind]['training_tokens'] / 1e6:.2f} M",
            f"{card['seen_tokens'][kind] / 1e6:.2f} M",
        )
        for kind in KINDS
    ]
    packages = [(name, version, card["licences"].get(name, "")) for name, version in data["packages"].items()]
    packages = [row for row in packages if row[2]]
    return f"""## Data

Text of seven kinds from Debian packages, as `benchmarks/embedded_model/corpus.py` extracts it. Whole
documents are held out; a paragraph that a held-out document contains, or that occurred before, is not in the
training text. The time did not suffice for all of the text: the last columns say how much there is and how
much was trained on.

{_table(("Kind", "Documents", "Characters", "Tokens", "Trained on"), rows)}
{_mixture(card)}

The dialogues are questions and answers in the form of the chat template, made from the glossaries of the
Python and PostgreSQL documentation ({talks["python-glossary"]} and {talks["postgresql-glossary"]} entries),
question lists ({talks["faq"]}) and NAME lines of manual pages ({talks["manual"]}); only answers are trained
there. A large part of the dialogues' {card["seen_tokens"]["dialogues"] / 1e6:.2f} M tokens repeats the
glossary entries. The model answers in their manner and stops by itself, but its answers are seldom right.

{_table(("Package", "Version", "Licence"), packages)}
Manual pages and translations name their own licences where these differ. The documents behind the held-out
text are listed in `heldout/SOURCES.md`.

## Training

{card["parameters"] / 1e6:.1f} M parameters: hidden size {shape.hidden_size}, experts of size
{shape.intermediate_size}, {shape.num_hidden_layers} layers, {shape.num_local_experts} experts a layer,
{shape.num_experts_per_tok} used per token, {shape.num_attention_heads} heads ({shape.num_key_value_heads} for
keys), {shape.vocab_size} vocabulary entries, input and output embeddings tied, context
{shape.max_position_embeddings} tokens.

{run["steps"]} steps, {run["tokens"] / 1e6:.2f} M tokens in {run["minutes"]:g} minutes on
{card["trained_on"]}. {card["remarks"]} {run["batch_tokens"]} tokens a step; rows of 256 tokens for the first
72 % of the time, then 512, and 1024 for the last 10 %. Optimizer: Muon for the matrices of attention and
experts, AdamW for the rest, peak learning rate {run["rate"]:g}, linear warm-up over
{_percent(run["warmup"])} of the time, then a cosine down to 1 % of the peak; weight decay
{run["weight_decay"]:g}, gradients clipped at norm {run["clip"]:g}, load-balancing
coefficient {shape.router_aux_loss_coef:g} (the mean over the layers of each layer's own loss), gate z-loss
0.001, seed {run["seed"]}. Float32 weights, bfloat16 products.
"""


def _losses(card: dict[str, Any]) -> str:
    rows = [
        (
            kind,
            f["tokens"],
            f"{f['model']:.3f}",
            f"{f['bigram']:.3f}",
            f"**{f['gain']:.3f}**",
            f"{f['own_kind_bigram']:.3f}",
        )
        for kind, f in card["heldout"].items()
    ]
    return f"""## Loss on held-out text

Nats a token. Rows of 512 tokens; the first is context only. The bigram model has the same tokenizer
and was counted on the whole training text of all kinds, more than the model came to see; of two smoothings
(interpolation with the unigram distribution, and Kneser-Ney) at several strengths, the one is shown that
does best on the very held-out text, which favours it too. The last column is a bigram model counted on the
kind alone. Held-out losses were watched during training, for the kinds' shares only.

{_table(("Kind", "Tokens", "Model", "Bigram", "Gain", "Bigram of the kind alone"), rows)}"""


def _routing(card: dict[str, Any]) -> str:
    routing = card["routing"]
    layers = range(len(routing["shares"]))
    experts = range(len(routing["shares"][0]))
    shares = [(layer, *(_percent(share) for share in routing["shares"][layer])) for layer in layers]
    spread = [
        (
            layer,
            f"{routing['total_variation'][layer]:.3f}",
            f"{routing['jensen_shannon_bits'][layer]:.3f}",
            *(
                f"{values[layer]:.3f}" if layer < len(values) else ""
                for values in (routing["next_gate_raw"], routing["next_gate_corrected"])
            ),
        )
        for layer in layers
    ]
    favourites = [
        (kind, *(max(experts, key=lambda e, s=by_layer[layer]: s[e]) for layer in layers))  # type: ignore[misc]
        for kind, by_layer in routing["shares_by_kind"].items()
    ]
    phases = card["phase_similarity"]
    similarity = [(kind, phases["sampled"][kind], phases["greedy"][kind]) for kind in (*KINDS, "mean")]
    return f"""## Experts

Share of each expert in its layer's assignments over all held-out text (smallest
{_percent(routing["smallest_share"])}, largest {_percent(routing["largest_share"])}):

{_table(("Layer", *(f"Expert {e}" for e in experts)), shares)}
The most used expert of every layer, by kind of text:

{_table(("Kind", *(f"Layer {layer}" for layer in layers)), favourites)}
How far the shares differ between the kinds, as the mean total variation distance over pairs of kinds and as
the Jensen-Shannon divergence of the seven; and how often a layer's gate input, given to the next layer's
gate, yields the experts that layer will use. The corrected column adds the mean difference of the two gate
inputs first, as calibrated on one half of the held-out text; both columns are of the other half.

{_table(("Layer", "Total variation", "Jensen-Shannon (bits)", "Next gate", "corrected"), spread)}
Cosine of the counts of activations in prefill and in decoding, mean over the layers: prompts of 128 held-out
tokens, continued by 128 tokens, sampled at temperature 0.8 or greedily.

{_table(("Kind", "Sampled", "Greedy"), similarity)}"""


def render(card: dict[str, Any]) -> str:
    """The whole card."""
    quoted = ((question, answer.replace("\n", "\n> ")) for question, answer in card["answers"].items())
    answers = "\n".join(f"> **{question}**\n>\n> {answer}\n" for question, answer in quoted)
    return _filled(f"""# The embedded model

A small mixture-of-experts language model with Mixtral's architecture, for trying, testing and measuring
without any other model. It writes text in the manner of its sources; it knows next to nothing.

{_training(card)}
{_losses(card)}
{_routing(card)}
## Answers

Greedy, in the chat template:

{answers}
All figures: `card.json`, written by `python -m benchmarks.embedded_model.evaluate` from the exported bfloat16
weights, computed in float32.
""")
