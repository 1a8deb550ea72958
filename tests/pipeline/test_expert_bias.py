"""The biases of experts' outputs follow the routing that was computed, written out row by row."""

from __future__ import annotations

import numpy as np
import torch

from pipeline.backbone.decoder_layer import DecoderLayer
from pipeline.device.cpu import CpuDevice


def layer_with(biases: torch.Tensor | None) -> DecoderLayer:
    """A layer of which only this part is there."""
    layer = DecoderLayer.__new__(DecoderLayer)
    layer.expert_biases, layer._device = biases, CpuDevice()
    return layer


def test_a_row_has_its_experts_biases_by_their_weights() -> None:
    """Of a skipped expert nothing is added, and of one that stands in for another its own."""
    biases = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])
    experts = np.array([[2, 0], [1, 1], [0, 2]], np.int32)
    weights = np.array([[0.75, 0.25], [0.5, 0.25], [0.0, 1.0]], np.float32)
    layer = layer_with(biases)
    found = layer.expert_bias(experts, weights)
    layer._device.close()
    expected = torch.tensor([[3.25, 32.5], [1.5, 15.0], [4.0, 40.0]])
    assert found is not None
    torch.testing.assert_close(found, expected)


def test_a_layer_without_biases_adds_none() -> None:
    layer = layer_with(None)
    assert layer.expert_bias(np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)) is None
    layer._device.close()
