"""The device's part of greedy sampling (`pipeline/text/logprobs.py` is the host's)."""

from __future__ import annotations

import torch
from torch import Tensor


def greedy(logits: Tensor) -> Tensor:
    """Of logits float32 [R, vocabulary] each row's largest and second, and the bits of their tokens: float32
    [R, 4]. torch's argmax takes the first of equals, and a NaN for the largest, on every device."""
    token = logits.argmax(1, keepdim=True)
    others = logits.scatter(1, token, -torch.inf)
    second = others.argmax(1, keepdim=True)
    numbers = torch.cat((logits.gather(1, token), others.gather(1, second)), dim=1)
    tokens = torch.cat((token, second), dim=1).to(torch.int32)
    return torch.cat((numbers, tokens.view(torch.float32)), dim=1)
