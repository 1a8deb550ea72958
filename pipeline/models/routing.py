"""A model's own routing: from router logits to experts and weights, on the host."""

from __future__ import annotations

import numpy as np

from pipeline.policies.view import FloatArray, Routing


def top_k_softmax(logits: FloatArray, k: int) -> Routing:
    """The k largest of softmax(logits), rescaled to sum 1 (Mixtral). logits float32 [R, E]; of equal
    logits the lower expert index is taken."""
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k].astype(np.int32)
    chosen = logits[np.arange(len(logits))[:, None], order]
    weights = np.exp(chosen - chosen[:, :1])
    weights /= weights.sum(axis=1, keepdims=True)
    return Routing(order, weights)
