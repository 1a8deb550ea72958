"""Runs llama.cpp with one model: computes and times the request on each line of stdin.

    ENV/bin/python -P benchmarks/llama_driver.py '{"model": FILE, "sequences": 4, "settings": {...}, ...}'

Runs in the environment of llama.cpp (`llama_environment.py`); with -P, since this folder also has a
`llama_cpp.py`. The first line on stdout describes the loaded model, after a few tokens with the settings:
where the code for this CPU is faulty, the process ends before. Each line {"settings": {...}, "prompts":
[[id]], "tokens": [[id]]} is answered by {"prefill_s", "decode_s"}: the prompts are prefilled one after the
other, then each step decodes one given token of every sequence. No state is kept between lines. The settings
are those of `llama_process.py`; "repack" is the first line's.
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

ERROR = 4  # ggml's log level
LOADED = "model buffer size"  # marks the log lines that describe the weights in memory
TRIAL_PROMPT = 64  # tokens


class Model:
    """A loaded model, with a context and its KV cache for each of the settings. Raises RuntimeError where
    llama.cpp refuses."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.log: list[str] = []
        self._logger = lib.llama_log_callback(self._logged)  # referenced: the library calls it
        lib.llama_log_set(self._logger, None)
        lib.llama_backend_init()
        model = lib.llama_model_default_params()
        _set(model, load_mode=lib.LLAMA_LOAD_MODE_NONE, use_extra_bufts=options["settings"]["repack"])
        began = time.perf_counter()
        self._model = lib.llama_model_load_from_file(options["model"].encode(), model)
        if not self._model:
            raise RuntimeError("llama.cpp did not load the model")
        self.load_s = time.perf_counter() - began
        self._options = options
        self._contexts: dict[str, Any] = {}
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(options["batch"], 0, 1)

    def try_out(self) -> None:
        """Prefill and decode a few tokens, alone and together."""
        for sequences in (1, self._options["sequences"]):
            prompts = [list(range(5, 5 + TRIAL_PROMPT))] * sequences
            self.run(self._options["settings"], prompts, [[5, 6]] * sequences)

    def run(
        self, settings: dict[str, Any], prompts: list[list[int]], tokens: list[list[int]]
    ) -> dict[str, float]:
        """Seconds of all prompts, and of all decode steps."""
        self._context = self._with(settings)
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        began = time.perf_counter()
        for sequence, prompt in enumerate(prompts):
            self._decode([(sequence, position, token) for position, token in enumerate(prompt)], 1)
        prefilled = time.perf_counter()
        lengths = [len(prompt) for prompt in prompts]
        for step, row in enumerate(zip(*tokens, strict=True)):
            self._decode([(i, lengths[i] + step, token) for i, token in enumerate(row)], len(row))
        return {"prefill_s": prefilled - began, "decode_s": time.perf_counter() - prefilled}

    def _with(self, settings: dict[str, Any]) -> Any:
        """The context of these settings."""
        key = json.dumps(settings)
        if key not in self._contexts:
            options, context = self._options, lib.llama_context_default_params()
            _set(
                context,
                n_ctx=options["context"] * options["sequences"],
                n_batch=options["batch"],
                n_ubatch=settings["micro_batch"],
                n_seq_max=options["sequences"],
                n_threads=settings["threads"],
                n_threads_batch=settings["threads"],
                flash_attn_type=int(settings["flash"]),
                no_perf=True,
            )
            self._contexts[key] = lib.llama_init_from_model(self._model, context)
            if not self._contexts[key]:
                raise RuntimeError("llama.cpp did not make a context")
        return self._contexts[key]

    def _decode(self, entries: list[tuple[int, int, int]], wanted: int) -> list[int]:
        """Compute (sequence, position, token) rows; returns the most probable next token of each of the last
        `wanted` rows, because choosing one is part of a step."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (sequence, position, token) in enumerate(entries):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = i >= len(entries) - wanted
        if code := lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        lib.llama_synchronize(self._context)
        chosen = []
        for i in range(len(entries) - wanted, len(entries)):
            logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(self._context, i), (self._vocabulary,))
            chosen.append(int(logits.argmax()))
            if not np.isfinite(logits[chosen[-1]]):  # the first that is not a number counts as the largest
                raise RuntimeError("a logit is not finite")
        return chosen

    def _logged(self, level: int, text: bytes, _: ctypes.c_void_p) -> None:
        line = text.decode(errors="replace").strip()
        if level == ERROR:
            print(line, file=sys.stderr)
        elif LOADED in line:
            self.log.append(" ".join(line.split()))


def _set(parameters: ctypes.Structure, **values: Any) -> None:
    """Set fields that must exist: ctypes silently accepts others, without effect."""
    known = {field[0] for field in parameters._fields_}
    for name, value in values.items():
        if name not in known:
            raise RuntimeError(f"this llama.cpp has no {name} in {type(parameters).__name__}")
        setattr(parameters, name, value)


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the library's own output goes to stderr
    model = Model(json.loads(sys.argv[1]))
    model.try_out()
    loaded = {
        "version": lib.__version__,
        "system": lib.llama_print_system_info().decode().strip(),
        "load_s": model.load_s,
        "buffers": model.log,
    }
    print(json.dumps(loaded), file=replies)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(model.run(**request)), file=replies)


if __name__ == "__main__":
    main()
