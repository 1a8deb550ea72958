"""The dim line below an answer: tokens, speed, KV reuse, where experts were computed, fidelity."""

from __future__ import annotations

from typing import Any

from launch.bench.profile import PhaseProfile
from launch.chat.conversation import Reply
from launch.terminal.format import count, percent
from shm.segment import byte_size


def summary(reply: Reply, emulation: str, max_tokens: int) -> list[str]:
    """The parts of the summary line below an answer."""
    stats = reply.done.stats
    parts = [count(reply.tokens, "token")]
    if stats.get("decode_tok_s"):
        parts.append(f"{stats['decode_tok_s']:.1f} tok/s")
    if reply.first_s is not None:
        parts.append(f"first {reply.first_s:.2f} s")
    if "kv_reused_tokens" in stats:
        parts.append(f"KV {stats['kv_reused_tokens']}/{stats.get('prompt_tokens', 0)}")
    phases = [phase for phase in stats.get("engine", {}).values() if isinstance(phase, dict)]
    if tiles := sum(PhaseProfile(phase, 0).tiles for phase in phases):
        parts.append(f"host {percent(sum(phase['host_tiles'] for phase in phases) / tiles)}")
        parts.append(f"{byte_size(sum(phase['fetched_bytes'] for phase in phases))} moved")
    if times := stats.get("preemptions"):
        parts.append(f"preempted {count(times, 'time')}")
    if where := cut(reply, max_tokens):
        parts.append(where)
    elif reply.done.reason == "cancelled":
        parts.append("cancelled")
    if note := approximation(stats.get("fidelity", {})):
        parts.append(note)
    if emulation:
        parts.append(f"emulated: {emulation}")
    return parts


def cut(reply: Reply, max_tokens: int) -> str:
    """Where an answer was cut short; "" where the model ended it."""
    if reply.done.reason != "length":
        return ""
    return "cut at max_tokens" if reply.tokens >= max_tokens else "cut at the context's end"


def approximation(fidelity: dict[str, Any]) -> str:
    """ "approximate" with each kind's share of the routed weight; "" for an exact answer."""
    if fidelity.get("exact", True):
        return ""
    shares = [(kind, part) for kind, part in fidelity.items() if kind != "exact" and part > 0]
    words = ", ".join(f"{percent(part, 1)} {kind}" for kind, part in shares)
    return f"approximate: {words}" if words else "approximate: all computed as routed"
