"""Gives requests their sequences in the KV cache, which begin with what is computed already of their prompts.

What a running request has computed, in whole blocks, and what ended ones have left, is in a `PrefixTree`,
separate for each client. Where blocks are needed, those that no running sequence holds are evicted. Used by
the engine's thread alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress

import numpy as np
import torch

from pipeline.backbone.kv_blocks import blocks_for
from pipeline.backbone.kv_cache import KVCache, SequenceKV, States
from pipeline.config import KV_BLOCK
from pipeline.policies.view import Policy
from pipeline.scheduling.jobs import Job
from pipeline.scheduling.prefix_tree import NOTHING, Match, PrefixTree, common_prefix

OPENING = 16  # last tokens of a prompt, with which a template opens the answer: another turn may lack them


class PrefixCache:
    """The KV of all clients' tokens, by prefix."""

    def __init__(self, kv: KVCache) -> None:
        self._hits = 0  # requests that began with computed tokens
        self._reused = 0  # those tokens
        self._kv = kv
        self._tree: PrefixTree[States] = PrefixTree(kv, kv.snapshots)
        self._policy: Policy | None = None  # which has computed all that is in the tree

    @property
    def available(self) -> int:
        """Blocks that are free once all is evicted that no sequence holds."""
        return self._kv.free + self._tree.evictable

    def stats(self) -> dict[str, int]:
        kept = KV_BLOCK * self._tree.evictable  # tokens of the blocks that no request uses
        return {
            "kv_tokens_used": self._kv.used - kept,
            "kv_tokens_kept": kept,
            "kv_tokens": self._kv.budget,
            "kv_reused_tokens": self._reused,
            "kv_hits": self._hits,
            "kv_evicted_blocks": self._tree.evicted,
            "kv_shared_blocks": self._tree.shared,
            "kv_snapshots": len(self._tree.snapshots),
        }

    def awaits(self, job: Job, running: Collection[Job]) -> bool:
        """Whether another request of the client is prefilling at least a block more of the job's prompt than
        is computed now."""
        if job.awaited is not None:
            other, until = job.awaited
            if other in running and other.prefilling and other.filled < until:
                return True
            job.awaited = None
        others = [j for j in running if j.client == job.client and j.shares and j.prefilling]
        if not job.shares or not others:
            return False
        known = self._find(job).length
        for other in others:
            common, until = self._expected(job, other)
            if common >= known + KV_BLOCK and until > other.filled:
                job.awaited = other, until
                if self._kv.snapshots is not None:
                    other.stops.add(until)
                return True
        return False

    def _expected(self, job: Job, other: Job) -> tuple[int, int]:
        """Returns how many tokens of a job's prompt will be found once another one is prefilled, and how many
        of that one's must be for it."""
        if other.kv is None or other.kv.long != self._kv.is_long(len(job.ids)):
            return 0, 0
        common = common_prefix(job.ids[:-1], other.ids[: other.prefill_end])
        whole = common // KV_BLOCK * KV_BLOCK
        if common == whole or whole + KV_BLOCK > other.prefill_end or self._kv.snapshots is not None:
            return whole, whole
        return common, whole + KV_BLOCK

    def _find(self, job: Job) -> Match:
        """Returns the longest prefix of a job's tokens that is computed, without the last one, which must be
        computed for its logits."""
        if not job.shares:
            return NOTHING
        return self._tree.find((job.client, self._kv.is_long(len(job.ids))), job.ids[:-1])

    def begin(self, job: Job, running: Collection[Job] = ()) -> SequenceKV | None:
        """Returns a sequence with room for a token more than a job has, of which those that are found are
        there. None where that leaves no blocks that the `running` ones need next, or there is no place."""
        if self._kv.places == 0:
            return None
        room = min(len(job.tokens) + 1, job.max_kv_tokens) if job.grows else job.max_kv_tokens
        held = [(j, j.kv.capacity) for j in running if j.grows and j.kv is not None]
        spare = sum(capacity < j.max_kv_tokens for j, capacity in held)
        match = self._find(job)
        while not self._fits(match, room, spare):
            if match.tail is None:
                return None
            # The tail is copied, and holds one block more meanwhile.
            match = NOTHING if self._kv.snapshots is not None else match.without_tail
        kv = self._kv.allocate(0)
        kv.select_rope(len(job.tokens))
        if match.length:
            self._tree.touch(match.path)
            blocks = np.array([node.block for node in match.path], np.int32)
            self._kv.hold(blocks)
            kv.begin(blocks, match.length, self._tree.snapshots.get(match.path[-1]))
        self.grow(kv, room)
        if job.shares and self._kv.snapshots is not None:
            # Where others have gone on otherwise, and before the end, where the next turn may.
            last = max(0, job.prefill_end - OPENING) // KV_BLOCK * KV_BLOCK
            job.stops |= {length for length in (match.common, last) if length > match.length}
        if not job.preemptions:
            self._reused += min(match.length, job.prompt_length)
            self._hits += match.length > 0
        return kv

    def _fits(self, match: Match, room: int, spare: int) -> bool:
        """Whether blocks are available for the tokens that do not match, and `spare` ones."""
        blocks = [node.block for node in match.path]
        idle = np.count_nonzero(self._kv.references[blocks] == 1)  # so far evictable
        return blocks_for(room) - len(match.nodes) + spare <= self.available - int(idle)

    def grow(self, kv: SequenceKV, tokens: int) -> bool:
        """Give a sequence room for so many tokens. False where the blocks are not available."""
        missing = kv.missing(tokens)
        if missing > self.available:
            return False
        self._tree.evict(missing - self._kv.free)
        kv.grow(tokens)
        return True

    def publish(self, job: Job) -> None:
        """Let others begin with the filled blocks of a running request; of a recurrent model at its stops."""
        if (kv := job.kv) is None:
            return
        job.published = kv.length // KV_BLOCK
        if not job.shares:
            return
        node = self._tree.insert((job.client, kv.long), job.ids[: kv.length], kv.blocks)
        if kv.length in job.stops and node is not None and self._tree.wants_states(node):
            with suppress(torch.OutOfMemoryError):
                self._tree.snapshots[node] = kv.copied_states()

    def end(self, job: Job, kv: SequenceKV, *, doubtful: bool = False) -> None:
        """Take back a job's sequence. Its tokens are kept as long as there is room; where its numbers may be
        wrong, whoever computed them, all is forgotten that begins as they do, with those that it has from
        others."""
        account, tokens = (job.client, kv.long), job.ids[: kv.length]
        if job.shares and doubtful:
            self._tree.discard(account, tokens, kv.begun)
        elif job.shares and kv.length:
            node = self._tree.insert(account, tokens, kv.blocks, partial=True)
            if node is not None and self._tree.wants_states(node):
                self._tree.snapshots[node] = kv.states
        self._kv.release(kv)

    def follow(self, policy: Policy, running: Iterable[Job]) -> None:
        """Forget all where this is another policy, and it or the one before is approximate: what one has
        computed is not what the other would have. Running requests keep theirs, but share it no more."""
        before, self._policy = self._policy, policy
        if before is None or before is policy or (before.exact and policy.exact):
            return
        for job in running:
            job.shares = False
        self._tree.forget()

    def forget(self, client: bytes) -> None:
        """Forget all of a client that has disconnected."""
        self._tree.forget(client)

    def clear(self) -> None:
        """Forget all that no request uses."""
        self._tree.evict(self._tree.evictable)
