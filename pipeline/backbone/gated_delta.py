"""The gated delta rule of one layer, on the device, in the place of attention: x -> what the layer adds.

A head's matrix S [key_dim, value_dim] is what a sequence keeps. A token with query q, key k, value v, decay d
and rate b gives

    S = d S + k (b (v - d S'k))'        out = S'q

On the host C does it for single tokens (`decoder_layer.py`). For many tokens the corrections of a chunk are
found together: within it they solve a triangular system, and S goes from chunk to chunk. All is float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pipeline.backbone.attention import HostAttention, host_projection
from pipeline.backbone.batch import Batch
from pipeline.backbone.weights import Weights
from pipeline.models.spec import GatedDelta
from workers.kernels.layer import Delta

CHUNK = 64  # tokens whose corrections are found together
UNIT_EPS = 1e-6  # of the lengths of queries and keys; the config's rms_norm_eps does not apply to them


@dataclass(frozen=True)
class DeltaInputs:
    """Of T tokens, after the convolution; all float32."""

    q: Tensor  # [T, key_heads, key_dim], of length key_dim ** -0.5
    k: Tensor  # [T, key_heads, key_dim], of length 1
    v: Tensor  # [T, value_heads, value_dim]
    log_decay: Tensor  # [T, value_heads], at most 0
    rate: Tensor  # [T, value_heads], within 0..1


class GatedDeltaNet:
    """A layer with such heads; each head of queries and keys serves several heads of values."""

    def __init__(self, spec: GatedDelta, weights: Weights, eps: float) -> None:
        """`eps`: of the norm of values."""
        self._spec, self._eps = spec, eps
        if "qkvz" in weights:
            self._first = weights.linear("qkvz", "ba", order=_by_kind(spec))
        else:
            self._first = weights.linear("qkv", "z", "b", "a")
        self._values = spec.value_heads * spec.value_dim
        self._split = [spec.channels, self._values, spec.value_heads, spec.value_heads]
        self._taps = weights.vector("taps")[:, 0].T.contiguous()  # [taps, channels], the newest token's last
        self._decay = -weights.vector("decay_log").exp()
        self._decay_bias = weights.vector("decay_bias")
        self._norm = weights.vector("value_norm")
        self._output = weights.linear("output")

    def __call__(self, layer: int, x: Tensor, batch: Batch) -> Tensor:
        s = self._spec
        mixed, z, b, a = torch.split(self._first(x), self._split, dim=1)
        log_decay = self._decay * functional.softplus(a + self._decay_bias)
        rate = b.sigmoid()
        outputs, start = [], 0
        for span in batch.spans:
            rows = slice(start, start + len(span.tokens))
            start = rows.stop
            if batch.stored:
                last, matrices = span.kv.states[layer]
            else:
                last, matrices = (x.new_zeros(shape) for shape in s.state_shapes)
            padded = torch.cat((last, mixed[rows]))
            inputs = self._inputs(self._convolved(padded), log_decay[rows], rate[rows])
            out, after = delta_rule(inputs, matrices)
            if batch.stored:
                for pending, new in zip(
                    span.kv.pending[layer], (padded[len(padded) - s.taps + 1 :], after), strict=True
                ):
                    pending.copy_(new)
            outputs.append(out)
        heads = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        heads = functional.rms_norm(heads, self._norm.shape, self._norm, self._eps)
        return self._output((heads * functional.silu(z.view_as(heads))).reshape(len(x), -1))

    def on_host(self) -> HostAttention:
        s = self._spec
        arrays = (t.data_ptr() for t in (self._taps, self._decay, self._decay_bias, self._norm))
        sizes = s.key_heads, s.value_heads, s.key_dim, s.value_dim, s.taps
        delta = Delta(*sizes, *arrays, self._eps)
        return HostAttention(delta, host_projection(self._first), None, host_projection(self._output))

    def _convolved(self, padded: Tensor) -> Tensor:
        """[taps - 1 + T, channels]: [T, channels] through the convolution and SiLU."""
        count = len(padded) - len(self._taps) + 1
        total = padded[:count] * self._taps[0]
        for tap in range(1, len(self._taps)):
            total.addcmul_(padded[tap : tap + count], self._taps[tap])
        return functional.silu(total)

    def _inputs(self, convolved: Tensor, log_decay: Tensor, rate: Tensor) -> DeltaInputs:
        s = self._spec
        keys = s.key_heads * s.key_dim
        q, k, v = torch.split(convolved, [keys, keys, self._values], dim=1)
        q, k = (_unit(part.view(len(part), s.key_heads, s.key_dim)) for part in (q, k))
        v = v.view(len(v), s.value_heads, s.value_dim)
        return DeltaInputs(q * s.key_dim**-0.5, k, v, log_decay, rate)


def _unit(x: Tensor) -> Tensor:
    """Vectors of length 1."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + UNIT_EPS)


def _by_kind(s: GatedDelta) -> dict[str, NDArray[np.int64]]:
    """The rows of matrices that have all rows of a head of keys together: queries, keys, values and z; rates
    and decays. All queries first, and so on."""
    each = s.value_heads // s.key_heads
    orders = {}
    for role, sizes in {"qkvz": [s.key_dim] * 2 + [each * s.value_dim] * 2, "ba": [each] * 2}.items():
        heads = np.arange(s.key_heads * sum(sizes)).reshape(s.key_heads, -1)
        parts = np.split(heads, np.cumsum(sizes)[:-1], axis=1)
        orders[role] = np.concatenate([part.ravel() for part in parts])
    return orders


def delta_rule(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The heads' outputs [T, value_heads, value_dim], and the state [value_heads, key_dim, value_dim] after
    these tokens, from the one before them."""
    if len(inputs.v) == 1:
        return _one(inputs, state)
    outputs = []
    for lo in range(0, len(inputs.v), CHUNK):
        part = DeltaInputs(*(tensor[lo : lo + CHUNK] for tensor in vars(inputs).values()))
        out, state = _chunk(part, state)
        outputs.append(out)
    return torch.cat(outputs), state


def _one(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    each = inputs.v.shape[1] // inputs.k.shape[1]
    q, k = (part[0].repeat_interleave(each, 0)[:, None] for part in (inputs.q, inputs.k))  # [heads, 1, key]
    state = state * inputs.log_decay[0].exp()[:, None, None]
    change = (inputs.v[0][:, None] - k @ state) * inputs.rate[0][:, None, None]  # [heads, 1, value]
    state = state + k.transpose(1, 2) * change
    return (q @ state).transpose(0, 1), state


def _chunk(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """With D the decay between two tokens of the chunk, from which token i sees the changes c of those before
    it, and E that since the chunk's beginning:

        c_i + b_i sum over j < i of D_ij (k_i k_j) c_j = b_i (v_i - E_i S'k_i)
    """
    count, each = len(inputs.v), inputs.v.shape[1] // inputs.k.shape[1]
    # By head, contiguous: products of strided batches take twice as long.
    k, v = (part.transpose(0, 1).contiguous() for part in (inputs.k, inputs.v))  # [heads, T, numbers]
    keys_queries = torch.cat((inputs.k, inputs.q)).transpose(0, 1).contiguous()  # [key_heads, 2 T, key_dim]
    rate = inputs.rate.T[..., None]  # [heads, T, 1]
    total = inputs.log_decay.T.cumsum(1)  # [heads, T]
    later = torch.ones(count, count, dtype=torch.bool, device=v.device).triu(1)
    between = (total[:, :, None] - total[:, None, :]).masked_fill(later, -torch.inf).exp()  # [heads, T, T]
    since = total.exp()[..., None]
    remains = (total[:, -1:] - total).exp()[..., None]  # of a token's change at the end of the chunk

    def shared(part: Tensor) -> Tensor:
        return part.repeat_interleave(each, 0) if each > 1 else part

    of_keys, of_queries = torch.split(shared(keys_queries @ k.transpose(1, 2)), count, dim=1)
    known, read = torch.split(shared(keys_queries) @ state, count, dim=1)
    wanted = rate * (v - since * known)
    system = between * of_keys * rate
    changes = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True).contiguous()
    out = torch.baddbmm(since * read, between * of_queries, changes)
    state = torch.baddbmm(since[:, -1:] * state, shared(k).transpose(1, 2), remains * changes)
    return out.transpose(0, 1), state
