"""Attention in place of a family's `eager_attention_forward`, where it computes the same: of grouped queries
without repeating the keys, and of latents without expanding them.

That function stays for every other kind, and for models outside an engine: it is wrapped once where its
family's modules look it up, and acts as before unless a module was found to suit: its calls are `recorded`
in a forward of the model, and `suits` compares it with ours.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.config import EXPANDED_KV_BYTES
from pipeline.generic.caches import PerSequence, Stored

EXPANDED_ROWS = 128  # new tokens from which expanding all latents costs less than multiplying by them
KIND = "tandem_attention"  # attribute of a module: "grouped", "latent"; without one, the family's own
NAME = "eager_attention_forward"  # of a family's own function

# Of the random calls that compare ours with the family's: (new tokens, tokens before them), and factors of
# queries. Sinks and soft caps show in large scores, sinks most of all beside few keys.
SIZES = ((1, 0), (1, 1), (1, 30), (5, 0), (5, 30))
FACTORS = (1.0, 30.0)
SAME = 1e-3  # of the largest number: what float32's rounding may change
HIDDEN = 0.3  # of the tokens before a query, by the mask


class Latents(NamedTuple):
    """In place of keys and values."""

    latents: Any  # [1, 1, N, rank], both Tensor or Stored
    rotated: Any  # [1, 1, N, rope]

    @property
    def shape(self) -> torch.Size:
        """Sparse attention asks for the number of keys."""
        shape: torch.Size = self.latents.shape
        return shape


def wrap(module: nn.Module) -> None:
    """Let the attention function that a module's forward looks up be ours."""
    modeling = sys.modules[type(module).__module__]
    own = getattr(modeling, NAME, None)
    if own is not None and not hasattr(own, "tandem"):
        setattr(modeling, NAME, _wrapped(own))


def _wrapped(own: Callable[..., Any]) -> Callable[..., Any]:
    scored = _in_blocks(own)

    def attention(
        module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        one = KINDS.get(getattr(module, KIND, None), scored)
        if type(key) is not PerSequence:
            return one(module, query, key, value, attention_mask, **kwargs)
        masks = attention_mask or [None] * len(key)
        parts = []
        for k, v, mask, rows in zip(key, value, masks, key.rows, strict=True):
            part = query.narrow(2, rows.first, rows.count)
            parts.append(one(module, part, k, v, mask, **kwargs)[0])
        return torch.cat(parts, 1), None

    attention.tandem = True  # type: ignore[attr-defined]
    return attention


def _in_blocks(one: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function called for so many queries at a time that their scores have a bounded size."""

    def attention(module: nn.Module, query: Tensor, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        _, heads, count, _ = query.shape
        step = max(1, EXPANDED_KV_BYTES // (4 * heads * key.shape[-2]))
        if count <= step:
            return one(module, query, key, value, mask, **kwargs)
        # biases of positions, or sinks, [1, heads, T, *]
        by_row = {k: v for k, v in kwargs.items() if isinstance(v, Tensor) and v.shape[2:-1] == (count,)}
        parts = []
        for lo in range(0, count, step):
            hi = min(lo + step, count)
            part = mask if mask is None or mask.shape[-2] != count else mask[..., lo:hi, :]
            named = kwargs | {k: v[..., lo:hi, :] for k, v in by_row.items()}
            parts.append(one(module, query[:, :, lo:hi], key, value, part, **named)[0])
        return torch.cat(parts, 1), None

    return attention


def grouped(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, width], key and value [1, kv heads, N, *] in the cache's dtype, or Stored, mask [1,
    1, T, N]: float32 [1, T, heads, *]."""
    _, heads, count, _ = query.shape
    if isinstance(key, Stored):
        if not _hides(attention_mask):
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            return key.attend(query[0, :, 0], value.shape[-1], scale)[None, None], None
        key, value = key.read(), value.read()
    query = query.to(key.dtype)
    mask = None if attention_mask is None else attention_mask.to(key.dtype)
    attend = functional.scaled_dot_product_attention
    if count == 1:  # query heads of a group become rows of one product
        rows = query.reshape(1, key.shape[1], -1, query.shape[-1])
        y = attend(rows, key, value, attn_mask=mask, scale=scaling).reshape(1, 1, heads, -1)
    else:
        width = value.shape[-1]
        if width < key.shape[-1]:  # only of equal widths torch computes block by block, without all scores
            value = functional.pad(value, (0, key.shape[-1] - width))
        y = attend(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
        y = y[..., :width].transpose(1, 2)
    return y.float().contiguous(), None


def latent(
    module: Any,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None = None,
    scaling: float = 1.0,
    **others: Any,
) -> tuple[Tensor, Any]:
    """query [1, heads, T, nope + rope], key Latents, mask [1, 1, T, N]: float32 [1, T, heads, value]. The
    queries are multiplied by the expansion instead of the latents:

        q . (W_k c) = (W_k^T q) . c        sum_i a_i (W_v c_i) = W_v (sum_i a_i c_i)
    """
    if isinstance(key.latents, Stored):
        if not _hides(attention_mask):
            return _absorbed_token(module, query, key, scaling), None
        key = Latents(key.latents.read(), key.rotated.read())
    return (_expanded if query.shape[2] >= EXPANDED_ROWS else _absorbed)(
        module, query, key, value, attention_mask, scaling=scaling
    )


def _hides(mask: Tensor | None) -> bool:
    """Returns whether a mask hides any of the tokens."""
    return mask is not None and bool((mask if mask.is_floating_point() else ~mask).any())


def _absorbed_token(module: Any, query: Tensor, key: Latents, scaling: float) -> Tensor:
    """`_absorbed` for one token by the kernel: float32 [1, 1, heads, value]."""
    expansion, nope = _expansion(module, query, key)
    w_k, w_v = expansion[:, :nope], expansion[:, nope:]
    q = query[0].to(expansion.dtype)  # [heads, 1, nope + rope]
    whole = torch.cat((q[..., :nope] @ w_k, q[..., nope:]), -1)[:, 0]
    attended: Tensor = key.latents.attend(whole, expansion.shape[2], scaling, latent=True)
    out = attended[:, None].to(expansion.dtype) @ w_v.transpose(1, 2)  # [heads, 1, value]
    return out.transpose(0, 1)[None].float()


def _expanded(
    module: Any, query: Tensor, key: Latents, value: Any, mask: Tensor | None, scaling: float
) -> tuple[Tensor, None]:
    """By heads, a few at a time: keys and values of all of them would take far more memory than the
    cache."""
    c, rotated = key
    expansion, nope = _expansion(module, query, key)
    _, numbers, rank = expansion.shape
    count = c.shape[2]
    step = max(1, EXPANDED_KV_BYTES // (4 * (numbers + rotated.shape[-1]) * count))
    parts = []
    for some, q in zip(torch.split(expansion, step), torch.split(query, step, 1), strict=True):
        both = functional.linear(c[0, 0].to(expansion.dtype), some.reshape(-1, rank)).float()
        both = both.view(count, len(some), numbers).transpose(0, 1)[None]
        k = torch.cat((both[..., :nope], rotated.float().expand(-1, len(some), -1, -1)), -1)
        parts.append(grouped(module, q, k, both[..., nope:], mask, scaling)[0])
    return torch.cat(parts, 2), None


def _expansion(module: Any, query: Tensor, key: Latents) -> tuple[Tensor, int]:
    """The matrix [heads, nope + value, rank] that makes keys and values of latents, and nope."""
    stored: Tensor = module.kv_b_proj.stored
    expansion = stored.view(query.shape[1], -1, key.latents.shape[-1])
    return expansion, query.shape[-1] - key.rotated.shape[-1]


@_in_blocks
def _absorbed(
    module: Any, query: Tensor, key: Latents, value: Any, mask: Tensor | None, scaling: float
) -> tuple[Tensor, None]:
    c, rotated = key
    expansion, nope = _expansion(module, query, key)
    w_k, w_v = expansion[:, :nope], expansion[:, nope:]
    c, rotated, query = (part.to(expansion.dtype) for part in (c, rotated, query))
    scores = (query[..., :nope] @ w_k) @ c.transpose(2, 3) + query[..., nope:] @ rotated.transpose(2, 3)
    scores = scores.float() * scaling
    if mask is not None:
        scores += mask
    of_latents = scores.softmax(-1).to(c.dtype) @ c  # [1, heads, T, rank]
    return (of_latents @ w_v.transpose(1, 2)).transpose(1, 2).float().contiguous(), None


KINDS: dict[str | None, Callable[..., Any]] = {"grouped": grouped, "latent": latent}


def keep_latents(module: nn.Module) -> None:
    """Let a module with latent attention give `latent` the latents in place of keys and values."""
    own: Any = module.expand_kv

    def expand(latents: Any, rotated: Any) -> Any:
        if getattr(module, KIND, None) is None:
            return _for_each(own, latents, rotated)
        if type(latents) is PerSequence:
            each = [Latents(*both) for both in zip(latents, rotated, strict=True)]
            return PerSequence(each, latents.rows), PerSequence([None] * len(each), latents.rows)
        return Latents(latents, rotated), None

    vars(module)["expand_kv"] = expand


class Call(NamedTuple):
    """A module's call of its family's function."""

    own: Callable[..., Any]
    query: torch.Size  # [1, heads, T, width]
    key: torch.Size
    value: torch.Size
    mask: Tensor | None
    named: dict[str, Any]  # scaling, sinks, and what else this family has


Calls = dict[nn.Module, list[Call]]


@contextmanager
def recorded(decoder: nn.Module) -> Iterator[Calls]:
    """Within it the decoder's calls of attention are kept, by module."""
    calls: Calls = {}
    owns: dict[Any, Callable[..., Any]] = {}
    for name in {type(module).__module__ for module in decoder.modules()}:
        if (own := getattr(sys.modules[name], NAME, None)) is not None:
            owns[sys.modules[name]] = own
            setattr(sys.modules[name], NAME, _recording(own, calls))
    try:
        yield calls
    finally:
        for modeling, own in owns.items():
            setattr(modeling, NAME, own)


def _recording(own: Callable[..., Any], calls: Calls) -> Callable[..., Any]:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **named: Any
    ) -> Any:
        call = Call(own, query.shape, key.shape, value.shape, attention_mask, named)
        calls.setdefault(module, []).append(call)
        return own(module, query, key, value, attention_mask, **named)

    return attention


def suits(module: nn.Module, calls: Sequence[Call], device: torch.device) -> bool:
    """Whether ours computes what the family's function does in such calls of the module, found by comparing
    them in float32 on random numbers. Both of ours must suit a module with latents: many tokens are
    expanded."""
    random = torch.Generator().manual_seed(0)
    linear: Any = getattr(module, "kv_b_proj", None)
    if hasattr(module, "expand_kv"):
        module.kv_b_proj = _InFloat32(linear)
    try:
        return all(_same(module, call, random, device) for call in calls)
    except Exception:  # whatever a function does with arguments of other sizes
        return False
    finally:
        if hasattr(module, "expand_kv"):
            module.kv_b_proj = linear


class _InFloat32(nn.Module):
    """In place of an expansion of latents that is stored in another dtype."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.stored, self._bias = linear.stored.float(), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.stored, self._bias)


def _same(module: Any, call: Call, random: torch.Generator, device: torch.device) -> bool:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(device)

    for (count, before), factor in itertools.product(SIZES, FACTORS):
        tokens, query = before + count, factor * draw(1, call.query[1], count, call.query[3])
        ways: list[tuple[Callable[..., Any], Any, Any]] = []
        if hasattr(module, "expand_kv"):
            outputs, rank = module.kv_b_proj.stored.shape
            rope = call.key[3] + call.value[3] - outputs // call.key[1]
            latents = Latents(draw(1, 1, tokens, rank), draw(1, 1, tokens, rope))
            key, value = type(module).expand_kv(module, *latents)
            ways.append((latent, latents, None))
        else:
            key, value = (draw(1, shape[1], tokens, shape[3]) for shape in (call.key, call.value))
        mask = None if call.mask is None else _mask(call.mask, count, tokens, random)
        wanted, *_ = call.own(module, query, key, value, mask, **call.named)
        for ours, k, v in (*ways, (grouped, key, value)):
            found, _ = ours(module, query, k, v, mask, **call.named)
            close = found.shape == wanted.shape and (found - wanted).abs().max() <= SAME * wanted.abs().max()
            if not close:
                return False
    return True


def _mask(like: Tensor, count: int, tokens: int, random: torch.Generator) -> Tensor:
    """A random causal mask [1, 1, count, tokens], of the dtype of another one."""
    places = torch.arange(tokens) - (tokens - count) - torch.arange(count)[:, None]
    seen = (places == 0) | (places < 0) & (torch.rand(places.shape, generator=random) > HIDDEN)
    if like.is_floating_point():
        blocked = torch.finfo(like.dtype).min
        seen = torch.zeros(seen.shape, dtype=like.dtype).masked_fill(~seen, blocked)
    return seen[None, None].to(like.device)


def _for_each(expand: Callable[..., Any], latents: Any, rotated: Any) -> Any:
    if type(latents) is not PerSequence:
        return expand(latents, rotated)
    parts = [expand(*both) for both in zip(latents, rotated, strict=True)]
    return tuple(PerSequence(part, latents.rows) for part in zip(*parts, strict=True))
