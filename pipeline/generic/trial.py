"""What is tried when a model has been loaded, on a few tokens: what its caches keep, what its routers
compute, which mixers take several sequences at once, and whether all of it gives what the model's own forward
gives."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache

from pipeline.backbone.kv_cache import KVCache, SequenceKV
from pipeline.checkpoint.decoder import RESERVED, TOKENS
from pipeline.errors import ModelError
from pipeline.generic import attention
from pipeline.generic.caches import LayerKept, OneToken, Rows, kept_by
from pipeline.generic.packing import Packing
from pipeline.generic.routers import Seen
from pipeline.generic.skeleton import MoeLayer, Skeleton

DECODING = ((4, 0, 0), (1, 0, 0), (1, 5, 0), (1, 1, 4), (0, 1, 1))  # new tokens of three sequences, by step
ALONE = ((4,), (1,), (1,), (1,))
CHUNKS = ((3,), (4,))

# Mean errors of hidden states, relative to their deviation, that rounding explains: in float32, with rounded
# weights, and with rounded keys and values too. A wrong computation has more.
EXACT, ROUNDED, CACHED = 2e-4, 0.05, 0.1

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Observed:
    """The findings of one forward of the model as it was made."""

    tokens: list[int]
    hidden: Tensor  # float32 [TOKENS, H], the last hidden states
    cache: Cache
    kept: list[LayerKept]
    routers: list[Seen]
    attention: attention.Calls


def output_of(x: Tensor) -> Tensor:
    """Returns numbers in place of the experts' output in trials."""
    return 0.5 * x


@torch.inference_mode()
def observe(skeleton: Skeleton, vocabulary: int) -> Observed:
    """Run the decoder as transformers does, on the first few tokens of a sequence."""
    tokens = [(5 * i + 3) % (vocabulary - RESERVED) + RESERVED for i in range(TOKENS)]
    watched = [_Watched(layer) for layer in skeleton.layers]
    cache = new_cache(skeleton.decoder)
    ids = torch.tensor([tokens], device=next(skeleton.decoder.parameters()).device)
    try:
        positions = torch.arange(TOKENS, device=ids.device)[None]
        with attention.recorded(skeleton.decoder) as calls:
            out = skeleton.decoder(input_ids=ids, position_ids=positions, cache=cache, use_cache=True)
    finally:
        for layer in watched:
            layer.restore()
    if not out.last_hidden_state.isfinite().all():
        raise ModelError("the model's weights give numbers that are infinite or not a number")
    # Others belong to parts for images.
    skeleton.layers = [layer for layer, w in zip(skeleton.layers, watched, strict=True) if w.called]
    watched = [layer for layer in watched if layer.called]
    return Observed(
        tokens,
        out.last_hidden_state[0],
        cache,
        kept_by(cache, TOKENS, skeleton.decoder),
        [layer.seen() for layer in watched],
        calls,
    )


def new_cache(decoder: nn.Module) -> Cache:
    """A cache for one sequence, of the family's own class where it has one."""
    modeling = sys.modules[type(decoder).__module__]
    own = [c for c in vars(modeling).values() if isinstance(c, type) and issubclass(c, DynamicCache)]
    own = [c for c in own if c.__module__ == modeling.__name__]
    return own[0]() if own else DynamicCache(config=decoder.config)


class _Watched:
    """Records what one layer's router and experts are given."""

    def __init__(self, layer: MoeLayer) -> None:
        self._layer = layer
        self._seen: Seen | None = None
        self.called = False  # the experts
        vars(layer.experts)["tandem_call"] = self._experts
        self._before = vars(layer.router).get("forward")
        self._own = layer.router.forward
        layer.router.forward = self._router

    def _router(self, x: Tensor, *more: Any, **named: Any) -> Any:
        outputs = self._own(x, *more, **named)
        self._seen = Seen(x, (more, named), tuple(outputs))
        return outputs

    def _experts(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        self.called = True
        seen = self.seen()
        seen.experts, seen.weights = index.reshape(len(x), -1), weights.reshape(len(x), -1)
        return output_of(x)

    def seen(self) -> Seen:
        if self._seen is None:
            raise ModelError(f"the router of {self._layer.name} was not called before its experts")
        return self._seen

    def restore(self) -> None:
        if self._before is None:
            del self._layer.router.forward
        else:
            self._layer.router.forward = self._before


class Trial:
    """Compares steps of sequences with the model's own forward."""

    def __init__(
        self, skeleton: Skeleton, packing: Packing, observed: Observed, exact: bool, device: torch.device
    ) -> None:
        """`exact`: everything is computed in float32."""
        self._decoder, self._packing, self._observed = skeleton.decoder, packing, observed
        self._tolerance = EXACT if exact else ROUNDED
        self._device, self._dtype = device, torch.float32

    def run(self) -> tuple[bool, bool]:
        """Choose how attention and mixers compute; returns whether a step may have several sequences, and
        whether a prompt may come in chunks. Raises ModelError where no way gives what the model's own forward
        gives."""
        mixers = self._packing.mixers.values()
        kinds = [*dict.fromkeys(map(type, mixers))]
        self._choose_attention()
        self._packing.rows = set(kinds)
        several = self._same(DECODING)
        if not several:
            self._packing.rows = set()
            several = self._same(DECODING)
            for kind in kinds if several and len(kinds) > 1 else ():
                self._packing.rows.add(kind)
                if not self._same(DECODING):
                    self._packing.rows.discard(kind)
        if not several and not self._same(ALONE):
            raise ModelError(
                f"{type(self._decoder).__name__} computes something else with our caches:"
                " this family cannot run here"
            )
        chunks = self._same(CHUNKS)
        self._choose_copies()
        return several, chunks

    def cache_in(self, dtype: torch.dtype, raw: frozenset[int]) -> None:
        """Let the layers `raw` take keys and values in this dtype of the cache, if they can. The tolerance
        must allow for its rounding. Raises ModelError where the model cannot be computed so."""
        cache = self._packing.cache
        assert cache is not None
        self._dtype = dtype
        cache.raw = raw
        if not self._same(ALONE, CACHED):
            cache.raw = frozenset()

    def keep_in_place(self, one: OneToken, layers: frozenset[int]) -> None:
        """Let these layers attend by this kernel where there is one new token, if they can."""
        cache = self._packing.cache
        assert cache is not None
        cache.one, cache.in_place = one, layers
        if not self._same(ALONE, None if self._dtype == torch.float32 else CACHED):
            cache.in_place = frozenset()

    def _choose_copies(self) -> None:
        """Let modules read recurrent states without a copy, if they leave them as they are."""
        cache = self._packing.cache
        assert cache is not None
        cache.copies = False
        kv = self._sequence()
        for count in (4, 1):
            before = [[state.clone() for state in layer] for layer in kv.states]
            self._step([kv], [count])
            pairs = zip(chain(*before), chain(*kv.states), strict=True)
            cache.copies |= not all(torch.equal(old, new) for old, new in pairs)
            kv.advance(count)

    @torch.inference_mode()
    def _choose_attention(self) -> None:
        """Use our attention in the modules that it suits, unless it is not all that they do with keys."""
        calls = self._observed.attention
        ours = [module for module in calls if attention.suits(module, calls[module], self._device)]
        for module in ours:
            setattr(module, attention.KIND, "latent" if hasattr(module, "expand_kv") else "grouped")
        if ours and not self._same(ALONE):
            for module in ours:
                delattr(module, attention.KIND)

    def _same(self, plan: Sequence[tuple[int, ...]], tolerance: float | None = None) -> bool:
        try:
            found = self.hidden(plan)
        except Exception as e:  # whatever a module does with what it does not expect
            log.debug("trial: %s: %s", type(e).__name__, e)
            return False
        wanted = self._observed.hidden
        errors = torch.cat([(h - wanted[: len(h)]).abs() for h in found]) / wanted.std()
        return bool(errors.mean() <= (tolerance or self._tolerance))

    @torch.inference_mode()
    def hidden(self, plan: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """The last hidden states of sequences with the observed tokens, [T, H] each, computed by this
        plan."""
        sequences = [self._sequence() for _ in plan[0]]
        found: list[list[Tensor]] = [[] for _ in sequences]
        for counts in plan:
            hidden = iter(torch.split(self._step(sequences, counts), [n for n in counts if n]))
            for parts, kv, count in zip(found, sequences, counts, strict=True):
                if count:
                    parts.append(next(hidden))
                    kv.advance(count)
        empty = self._observed.hidden[:0]
        return [torch.cat([empty, *parts]) for parts in found]

    @torch.inference_mode()
    def _step(self, sequences: Sequence[SequenceKV], counts: Sequence[int]) -> Tensor:
        """The last hidden states of so many new tokens of the sequences."""
        rows, tokens, first = [], [], 0
        for kv, count in zip(sequences, counts, strict=True):
            if count:
                rows.append(Rows(kv, first, first + count, kv.length))
                tokens += self._observed.tokens[kv.length : kv.length + count]
                first += count
        return self._packing(self._decoder, tokens, rows)

    def _sequence(self) -> SequenceKV:
        return sequence(self._observed.kept, TOKENS, self._dtype, self._device)


@dataclass(frozen=True)
class _Cached:
    """The shapes of what sequences of the model keep."""

    kv_streams: list[tuple[tuple[int, int], ...]]
    state_shapes: list[tuple[tuple[int, ...], ...]]
    rope_switch: None = None


def sequence(
    kept: Sequence[LayerKept], capacity: int, dtype: torch.dtype, device: torch.device
) -> SequenceKV:
    """A sequence in a KV cache of its own."""
    cached = _Cached([layer.streams for layer in kept], [layer.states for layer in kept])
    return KVCache(cached, dtype, device, capacity).allocate(capacity)
