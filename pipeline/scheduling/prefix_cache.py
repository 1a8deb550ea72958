"""Gives requests their sequences in the KV cache, which begin with what is computed already of their prompts.

What a running request has computed, and what ended ones have left, is in a `PrefixTree`, separate for each
client. Where blocks are needed, those that no running sequence holds are evicted. Handles token ids, no
requests and no text. Used by the engine's thread alone."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import torch

from pipeline.backbone.kv_blocks import blocks_for
from pipeline.backbone.kv_cache import KVCache, SequenceKV, States
from pipeline.config import KV_BLOCK
from pipeline.scheduling.prefix_tree import Match, PrefixTree, Tokens, common_prefix

OPENING = 16  # last tokens of a prompt, with which a template opens the answer: another turn may lack them


class PrefixCache:
    """The KV of all clients' tokens, by prefix."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._tree: PrefixTree[States] = PrefixTree(kv, kv.snapshots)

    @property
    def available(self) -> int:
        """Blocks that are free once all is evicted that no sequence holds."""
        return self._kv.free + self._tree.evictable

    @property
    def kept(self) -> int:
        """Tokens of the blocks that no sequence holds."""
        return KV_BLOCK * self._tree.evictable

    def stats(self) -> dict[str, int]:
        return {
            "kv_evicted_blocks": self._tree.evicted,
            "kv_shared_blocks": self._tree.shared,
            "kv_snapshots": len(self._tree.snapshots),
        }

    def find(self, client: bytes, tokens: Tokens) -> Match:
        """Returns the longest prefix of a client's tokens that is computed, without their last one, which
        must be computed for its logits."""
        return self._tree.find((client, self._kv.is_long(len(tokens))), tokens[:-1])

    def expected(self, tokens: Tokens, others: Tokens) -> tuple[int, int]:
        """Returns how many of a prompt's tokens will be found once all of `others` are computed, and how many
        of those must be for that."""
        common = common_prefix(tokens[:-1], others)
        whole = common // KV_BLOCK * KV_BLOCK
        if common == whole or whole + KV_BLOCK > len(others) or self._kv.snapshots is not None:
            return whole, whole
        return common, whole + KV_BLOCK

    def begin(self, match: Match | None, tokens: int, room: int, spare: int) -> SequenceKV | None:
        """Returns a sequence with room for `room` tokens, of which those of the match are there; `tokens`:
        those that are known. None where fewer blocks than that and `spare` are available, or no place."""
        blocks = [] if match is None else [node.block for node in match.path]
        whole = 0 if match is None else len(match.nodes)
        own = blocks_for(room) - whole
        idle = np.count_nonzero(self._kv.references[blocks] == 1)  # so far evictable
        if self._kv.places == 0:
            return None
        if own + spare > self.available - idle:
            if match is None or match.tail is None:
                return None
            # The tail is copied, and holds one block more meanwhile.
            whole_blocks = Match(match.nodes, None, KV_BLOCK * whole, match.common)
            return self.begin(None if self._kv.snapshots else whole_blocks, tokens, room, spare)
        kv = self._kv.allocate(0)
        kv.select_rope(tokens)
        if match is not None and match.length:
            self._tree.touch(match.path)
            taken = np.array(blocks, np.int32)
            self._kv.hold(taken)
            kv.begin(taken, match.length, self._tree.snapshots.get(match.path[-1]))
        self.grow(kv, room)
        return kv

    def grow(self, kv: SequenceKV, tokens: int) -> bool:
        """Give a sequence room for so many tokens. False where the blocks are not available."""
        missing = kv.missing(tokens)
        if missing > self.available:
            return False
        self._tree.evict(missing - self._kv.free)
        kv.grow(tokens)
        return True

    def publish(self, client: bytes, tokens: Tokens, kv: SequenceKV, snapshot: bool) -> None:
        """Let others begin with the filled blocks of a running sequence; of a recurrent model with
        `snapshot`, at the end of a block."""
        node = self._tree.insert((client, kv.long), tokens[: kv.length], kv.blocks)
        if snapshot and node is not None and self._tree.wants_states(node):
            with suppress(torch.OutOfMemoryError):
                self._tree.snapshots[node] = kv.copied_states()

    def keep(self, client: bytes, tokens: Tokens, kv: SequenceKV) -> None:
        """Keep all filled tokens of a sequence, which ends."""
        if kv.length:
            node = self._tree.insert((client, kv.long), tokens[: kv.length], kv.blocks, partial=True)
            if node is not None and self._tree.wants_states(node):
                self._tree.snapshots[node] = kv.states
        self._kv.release(kv)

    def discard(self, client: bytes, tokens: Tokens, kv: SequenceKV) -> None:
        """Forget a sequence, which ends, with all that begins as it does: its numbers may be wrong, whoever
        computed them."""
        self._tree.discard((client, kv.long), tokens[: kv.length], 0)
        self._kv.release(kv)

    def forget(self, client: bytes) -> None:
        """Forget all of a client that has disconnected."""
        self._tree.forget(client)

    def clear(self) -> None:
        """Forget all that no sequence holds."""
        self._tree.evict(self._tree.evictable)

    def stops(self, match: Match, tokens: int) -> set[int]:
        """Returns the lengths at which a recurrent model's states are worth a snapshot, while so many tokens
        are prefilled: where others have gone on otherwise, and before the end, where the next turn may."""
        if self._kv.snapshots is None:
            return set()
        last = max(0, tokens - OPENING) // KV_BLOCK * KV_BLOCK
        return {length for length in (match.common, last) if length > match.length}
