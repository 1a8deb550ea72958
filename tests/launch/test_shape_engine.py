"""An engine on a shape with random weights: real processes, one layer of real size."""

from __future__ import annotations

import json

from engines import Launched, engines_left, run

MODEL = "shape:olmoe-1b-7b/1"
# A given chunk, and an unusual tile: other engines of this machine use other stores.
QUICK = ["--format", "int4", "--context", "64", "--chunk", "16", "--tile", "384", "--device", "cpu"]


def test_a_shape_answers_ids_and_refuses_text() -> None:
    with Launched("serve", "--model", MODEL, "--name", "shape", "--log-level", "info", *QUICK) as engine:
        assert engine.line().startswith("shape ipc://"), engine.stderr
        ask = ["generate", "--connect", "shape", "--max-tokens", "4"]
        code, out, err = run(*ask, "--prompt-tokens", "1,2,3", "--ignore-eos", "--json")
        assert code == 0, err
        answer = json.loads(out)
        code, out, err = run(*ask, "--prompt", "Hello")
        assert (code, out) == (2, "")
        assert "has no tokenizer, so it reads no text; give --prompt-tokens" in err
        engine.process.terminate()
        code, _, log = engine.end()
        assert code == 0, log
    assert f"model: {MODEL}" in log
    assert "source random weights" in log
    assert len(answer["token_ids"]) == 4
    assert all(0 <= token < 50304 for token in answer["token_ids"])
    assert (answer["finish_reason"], answer["text"]) == ("length", "")
    assert engines_left() == []
