"""The sampling settings of a model's generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.errors import ModelError
from pipeline.text.generation_defaults import sampling_defaults
from pipeline.text.tokenizer import eos_ids
from protocol.messages import Sampling


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("{}", Sampling()),
        ('{"temperature": 0.7, "top_p": 0.9}', Sampling()),
        ('{"repetition_penalty": 1.2, "do_sample": false}', Sampling(repetition_penalty=1.2)),
        (
            '{"do_sample": true, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": null}',
            Sampling(temperature=0.7, top_k=20, top_p=0.8),
        ),
        ('{"do_sample": true}', Sampling(temperature=1.0)),
        (
            '{"do_sample": true, "min_p": 0.05, "temperature": 2, "repetition_penalty": 1}',
            Sampling(temperature=2.0, min_p=0.05),
        ),
        ('{"do_sample": false, "min_p": 0.05, "top_k": 5}', Sampling()),
    ],
)
def test_settings_of_the_file(tmp_path: Path, content: str, wanted: Sampling) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    assert sampling_defaults(tmp_path) == wanted


def test_greedy_without_the_file(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == Sampling()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1]",
        "[" * 100_000,
        '{"repetition_penalty": true}',
        '{"repetition_penalty": 0}',
        '{"repetition_penalty": NaN}',
        '{"do_sample": true, "top_k": 1.5}',
        '{"do_sample": true, "temperature": true}',
        f'{{"do_sample": true, "temperature": 1{"0" * 400}}}',  # no float
        f'{{"do_sample": true, "top_k": {2**63}}}',  # no number of a message
        *(
            json.dumps({"do_sample": True, name: value})
            for name in ("top_k", "repetition_penalty", "eos_token_id")
            for value in (10**400, -(10**400), 1 << 31, [["a"] * 1000], "a" * 10_000)
        ),
    ],
    ids=range(25),
)
def test_invalid_file_is_refused_in_one_short_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"generation_config\.json") as error:
        eos_ids(tmp_path) if "eos" in content else sampling_defaults(tmp_path)
    assert len(str(error.value)) < 300
    assert "\n" not in str(error.value)
