"""Times llama.cpp: a prompt and decode of one sequence of random tokens. For `llama_cpp.py`.

    ENV/bin/python -P benchmarks/llama_driver.py '{"model": FILE, "threads": 2, "prompt": 512, "new": 64}'

Runs in an environment with llama-cpp-python; with -P, since this folder also has a `llama_cpp.py`. Prints
tokens a second as JSON: the better of weights repacked for the CPU and weights as stored.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

import llama_cpp as lib
import numpy as np

FIRST = 5  # tokens before it may be special
AT_ONCE = 512  # tokens of a long prompt, as llama.cpp has it by itself


def rates(settings: dict[str, Any], repack: bool) -> dict[str, float]:
    """Tokens a second. Raises RuntimeError where llama.cpp refuses."""
    options = lib.llama_model_default_params()
    _set(options, use_extra_bufts=repack)
    model = lib.llama_model_load_from_file(settings["model"].encode(), options)
    if not model:
        raise RuntimeError("llama.cpp did not load the model")
    prompt, new = settings["prompt"], settings["new"]
    options = lib.llama_context_default_params()
    threads = settings["threads"]
    _set(options, n_ctx=prompt + new, n_batch=prompt, n_ubatch=AT_ONCE, n_threads=threads, no_perf=True)
    _set(options, n_threads_batch=threads, flash_attn_type=1)
    context = lib.llama_init_from_model(model, options)
    if not context:
        raise RuntimeError("llama.cpp did not make a context")
    vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    tokens = np.random.default_rng(1).integers(FIRST, vocabulary, prompt + new).tolist()
    batch = lib.llama_batch_init(prompt, 0, 1)

    def decode(first: int, count: int) -> None:
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i] = tokens[first + i], first + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i == count - 1
        if code := lib.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        lib.llama_synchronize(context)
        logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, count - 1), (vocabulary,))
        if not np.isfinite(logits.max()):
            raise RuntimeError("a logit is not finite")

    decode(0, min(prompt, AT_ONCE))  # pages and caches are warm
    lib.llama_memory_clear(lib.llama_get_memory(context), True)
    began = time.perf_counter()
    decode(0, prompt)
    prefilled = time.perf_counter()
    for step in range(new):
        decode(prompt + step, 1)
    ended = time.perf_counter()
    lib.llama_free(context)
    lib.llama_model_free(model)
    return {"prefill": prompt / (prefilled - began), "decode": new / (ended - prefilled)}


def _set(parameters: ctypes.Structure, **values: Any) -> None:
    """Set fields that must exist: ctypes silently accepts others, without effect."""
    known = {field[0] for field in parameters._fields_}
    for name, value in values.items():
        if name not in known:
            raise RuntimeError(f"this llama.cpp has no {name} in {type(parameters).__name__}")
        setattr(parameters, name, value)


def main() -> None:
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library's own output goes to stderr
    lib.llama_backend_init()
    found = [rates(json.loads(sys.argv[1]), repack) for repack in (True, False)]
    print(json.dumps({part: max(one[part] for one in found) for part in found[0]}), file=answer)


if __name__ == "__main__":
    main()
