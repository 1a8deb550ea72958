"""What clients with a key may do and see, by the right of their key. Local clients may do and see all.

`use` is for requests of one's own. `tune` also changes the policy, for everybody. `admin` also calibrates,
and sees what local clients see. Runs in the event loop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pipeline.accounts import allows
from protocol.keys import RIGHTS
from protocol.messages import Calibrate, Done, Error, ExpertActivity, PolicyChanged, SetPolicy, Welcome
from protocol.program import COMMAND

_NEEDED = {
    SetPolicy: ("tune", "changing the policy"),
    Calibrate: ("admin", "calibrating"),
    ExpertActivity: ("admin", "watching the experts"),
}
# Of the scheduler's counters, those that describe the engine and nobody's activity.
_PLAIN = ("max_running", "kv_tokens", "prefill_chunk", "prefill_chunk_alone", "context")
_PLAIN_STATS = ("policy", "policy_options", "emulation", "calibrated", "tiles_per_expert", "tile_bytes")


def denial(message: SetPolicy | Calibrate | ExpertActivity, right: str) -> Done | Error | None:
    """The refusal of a message that needs more than this right; None where it suffices."""
    needed, what = _NEEDED[type(message)]
    if allows(right, needed):
        return None
    reason = f"{what} needs a key with the right {needed}, and this one has {right}: {COMMAND} keys"
    if isinstance(message, Calibrate):
        return Done(message.request, "error", reason, usage=True)
    return Error(message.request, reason)


def sees_all(right: str) -> bool:
    """Whether paths on the engine's machine and others' activity are shown."""
    return right == RIGHTS[-1]


def own_stats(stats: Mapping[str, Any], own: Mapping[str, int]) -> dict[str, Any]:
    """Of the engine's counters those that do not tell what others do; `own`: the account's requests."""
    shown = {name: stats[name] for name in _PLAIN_STATS}
    shown["policy_options"] = {k: v for k, v in shown["policy_options"].items() if "/" not in str(v)}
    scheduler = stats["scheduler"]
    return shown | {"scheduler": {name: scheduler[name] for name in _PLAIN} | dict(own)}


class WithoutPaths:
    """Takes this engine's folders out of what is sent to a client that does not see all."""

    def __init__(self, model: str, folders: Mapping[str, Path]) -> None:
        """`model`: its name; `folders`: by what stands for each."""
        self._model = model
        by_length = sorted(folders.items(), key=lambda item: len(str(item[1])), reverse=True)
        self._folders = [(str(path), name) for name, path in by_length if path.is_absolute()]

    def __call__(self, message: object) -> object:
        match message:
            case Welcome():
                return replace(message, model=self._model)
            case Error():
                return replace(message, text=self._shown(message.text))
            case Done(error=error) if error:
                return replace(message, error=self._shown(error))
            case PolicyChanged():
                return replace(message, notes=tuple(map(self._shown, message.notes)))
        return message

    def _shown(self, text: str) -> str:
        for path, name in self._folders:
            text = text.replace(path, name)
        return text
