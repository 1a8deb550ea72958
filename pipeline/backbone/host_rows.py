"""The rows of a step that decodes on the host, and the memory that its layers write.

Tensors, arrays and addresses are made once a step, so that no layer calls torch: the weights of a layer evict
torch's code from the caches, and each call would read it from memory again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.arrays import FloatArray
from workers.kernels.layer import TOKEN, Tokens


class Written(NamedTuple):
    """What the host's kernel of a layer writes, float32 [R, width], until the next layer."""

    tensor: Tensor
    array: FloatArray
    address: int

    @classmethod
    def of(cls, rows: int, width: int) -> Written:
        """New memory."""
        tensor = torch.empty(rows, width)
        return cls(tensor, tensor.numpy(), tensor.data_ptr())


class HostRows:
    """A step's rows for the host's kernels of layers."""

    def __init__(self, rows: list[tuple[Any, ...]], hidden: int, experts: int) -> None:
        """`rows`: as TOKEN."""
        self.tokens = Tokens(np.array(rows, TOKEN))
        # written in turn: a layer reads the one before's
        self.streams = Written.of(len(rows), hidden), Written.of(len(rows), hidden)
        self.x, self.shared = Written.of(len(rows), hidden), Written.of(len(rows), hidden)
        self.logits = Written.of(len(rows), experts)
