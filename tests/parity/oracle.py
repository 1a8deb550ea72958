"""transformers as the oracle: log-probabilities and greedy continuations of its own model of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tiny_families import model_class
from torch import Tensor, nn
from transformers import AutoConfig

EXACT = 1e-4  # nats: what an engine's float32 log-probabilities may differ by
BATCH = 14  # texts


class Oracle:
    """One checkpoint in one dtype, on the CPU."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        # Expert by expert: torch's grouped products refuse sizes that are not multiples of 16 bytes.
        kind = model_class(AutoConfig.from_pretrained(folder))
        self.model = kind.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()
        self.experts = [m for m in self.model.modules() if hasattr(m, "is_concatenated")]

    def logprobs(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """[len(tokens), vocabulary] of one pass over them all; row i predicts token i + 1."""
        return self.batch([tokens])[0]

    @torch.no_grad()
    def batch(self, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """`logprobs` of each of several texts of one length, in passes over some of them at once."""
        rows: list[NDArray[np.float32]] = []
        for first in range(0, len(texts), BATCH):
            tokens = torch.tensor([list(tokens) for tokens in texts[first : first + BATCH]])
            logits = self.model(tokens, use_cache=False).logits.float()
            rows.extend(torch.log_softmax(logits, -1).numpy())
        return rows

    @contextmanager
    def noise(self, relative: float, seed: int) -> Iterator[None]:
        """Shift the input of every layer's experts by this much, at random, to show what it grows to."""
        generator = torch.Generator().manual_seed(seed)

        def shift(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x, *rest = inputs
            shifted = x * (1 + relative * torch.randn(x.shape, generator=generator))
            return shifted.to(x.dtype), *rest

        hooks = [experts.register_forward_pre_hook(shift) for experts in self.experts]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def noisy(
        self, texts: Sequence[Sequence[int]], relative: float, seeds: int
    ) -> Iterator[list[NDArray[np.float32]]]:
        """`batch` with noise of the first `seeds` seeds."""
        for seed in range(seeds):
            with self.noise(relative, seed):
                yield self.batch(texts)

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[list[int], NDArray[np.float32]]:
        """`count` new tokens, and the log-probabilities [count, vocabulary] that they were chosen from; each
        from a pass over all tokens before it, as a rotary embedding that depends on their number asks for."""
        tokens, rows = list(prompt), []
        for _ in range(count):
            rows.append(self.logprobs(tokens)[-1])
            tokens.append(int(rows[-1].argmax()))
        return tokens[len(prompt) :], np.stack(rows)
