"""Byte-level BPE tokenizer with a chat template."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from benchmarks.embedded_model.corpus import load
from benchmarks.embedded_model.sources import KINDS
from pipeline.assets import model_dir

VOCABULARY = 4096
CONTEXT = 1024  # tokens
SPECIAL = ("<s>", "</s>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
# A message is its role's token, the text, and the end token; nothing else, so no blank is learnt by accident.
# Tools are as Hermes's models write them: the model has learnt none, but programs that send some are served.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- set turns = messages %}
{%- if tools %}
    {{- '<|system|>' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
        {%- set turns = messages[1:] %}
    {%- endif %}
    {{- 'You can call these functions:\\n' }}
    {%- for tool in tools %}{{ (tool.function | tojson) + '\\n' }}{% endfor %}
    {{- 'A call of one is written so:\\n' }}
    {{- '<tool_call>\\n{"name": NAME, "arguments": {...}}\\n</tool_call><|end|>' }}
{%- endif %}
{%- for message in turns %}
    {%- if message.role == 'tool' %}
        {{- '<|user|><tool_response>\\n' + message.content + '\\n</tool_response><|end|>' }}
    {%- else %}
        {{- '<|' + message.role + '|>' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": ' + (call.function.name | tojson) }}
            {{- ', "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""


def train(corpus: Path) -> Tokenizer:
    """A tokenizer of `VOCABULARY` entries learnt from every kind's training text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()

    def texts() -> Iterator[str]:
        for kind in KINDS:
            yield from load(corpus, kind)

    tokenizer.train_from_iterator(
        texts(),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "</s>",
        "model_max_length": CONTEXT,
        "pad_token": "<pad>",
        "additional_special_tokens": list(SPECIAL[3:]),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def main() -> None:
    """Command line: `python -m benchmarks.embedded_model.tokenizer --corpus DIR --out DIR`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=model_dir())
    args = parser.parse_args()
    save(train(args.corpus), args.out)


if __name__ == "__main__":
    main()
