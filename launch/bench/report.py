"""The report of a comparison of policies: tables, the JSON object, a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import RenderableType

from launch.bench.figures import Figures, compared, policy_panels, policy_tables, show_tables
from launch.bench.profile import PhaseProfile
from launch.bench.run import PolicyResult
from launch.terminal.format import count, merged_notes, model_name, percent
from launch.terminal.plot import draw
from pipeline.counters import pause_note
from pipeline.models.shapes import is_shape
from shm.segment import byte_size


def routing_notes(model: str) -> list[str]:
    """A note on hits where a model's weights, and so its routers, are random."""
    note = "random weights route at random: hits, and what depends on them, are not those of the real model"
    return [note] * is_shape(model)


SPREAD = ("prefill_tok_s", "decode_tok_s", "first_token_s")  # shown with their range
SWEPT_AS = {"new": "gen"}  # where --sweep has another name for it


@dataclass(frozen=True)
class Report:
    """A comparison of policies. `config`: the engine and the workload, as in the JSON object."""

    config: dict[str, Any]
    results: Sequence[PolicyResult]
    emulation: str
    left_out: Sequence[PolicyResult] = ()  # policies that cannot run here

    @property
    def model_name(self) -> str:
        return model_name(self.config["model"], article="")

    @property
    def figures(self) -> list[Figures]:
        first = self.results[0]
        return [self._figures(result, None if len(self.results) == 1 else first) for result in self.results]

    def _figures(self, result: PolicyResult, first: PolicyResult | None) -> Figures:
        profile = result.decode(self.config["tile_bytes"])
        rows = max(profile.rows, 1)
        return Figures(
            result.request,
            result.exact,
            prefill=result.figures("prefill_tok_s"),
            decode=result.figures("decode_tok_s"),
            prefill_ratio=None if first is None else result.ratio(first, "prefill_tok_s"),
            decode_ratio=None if first is None else result.ratio(first, "decode_tok_s"),
            copied=median(result.figures("moved_bytes_per_token")),
            moved={kind: size / rows for kind, size in profile.moved.items()}
            | {"placed": result.placed_bytes},
            hits=profile.hit_rate,
            tile_hits=profile.tile_hit_rate,
            host_share=median(result.figures("host_share")),
            issued=profile.issued_share,
            busy={"host": profile.host_busy, "device": profile.device_busy},
            waits=profile.shares,
            fidelity=dict(profile.fidelity),
            first_token=[1e3 * seconds for seconds in result.figures("first_token_s")],
            kept=profile.kept_share,
            channels=profile.channels,
            perplexity=result.perplexity,
        )

    def parts(self) -> Iterator[RenderableType]:
        """The report as text."""
        rows = self.figures
        return show_tables(
            policy_tables(rows, self.emulation), [*self._about(), *compared(rows)], self._notes()
        )

    def _about(self) -> list[str]:
        c = self.config
        return [
            f"{self.model_name} on {c['device']}"
            + (f", {c['workers']} workers" if c["workers"] is not None else "")
            + f": experts {c['format']}, backbone {c['backbone_dtype']}",
            _cache(c),
            f"batch {c['batch']}: {count(c['prompt_len'], 'prompt token')} ({c['prompts']}),"
            f" {c['gen_len']} generated tokens, sampled",
            f"{count(c['rounds'], 'round')}, policies interleaved: median, and below it the range",
            warmed(c),
            *placed_by(c),
            *([f"{c['machine']}, {c['when'][:10]}"] if "machine" in c else []),
        ]

    def _notes(self) -> Iterator[str]:
        yield from routing_notes(self.config["model"])
        yield from merged_notes((result.request.name, self._notes_of(result)) for result in self.results)
        yield from self.without

    def _notes_of(self, result: PolicyResult) -> list[str]:
        tree = result.decode(self.config["tile_bytes"]).tree
        paused = pause_note(tree["paused_steps"], tree["steps"])
        return [*result.notes, *([f"{result.request.name}: {paused}"] if paused else [])]

    @property
    def without(self) -> list[str]:
        """A line for each policy that cannot run here."""
        return [f"{result.request.label} left out: {result.left_out}" for result in self.left_out]

    def conditions(self, swept: Sequence[str]) -> list[str]:
        """What all settings of a sweep of `swept` have in common."""
        c = self.config
        fixed = {"batch": c["batch"], "prompt": c["prompt_len"], "new": c["gen_len"]}
        words = [f"{name} {value}" for name, value in fixed.items() if SWEPT_AS.get(name, name) not in swept]
        if "cache" not in swept and c["expert_cache"] is not None:
            words.append(f"cache {percent(c['expert_cache'])} of all tiles")
        return [
            f"{self.model_name} on {c['device']}: experts {c['format']}",
            *[f"emulation: {self.emulation}"] * bool(self.emulation),
            *[", ".join(words)] * bool(words),
            *[f"median of {c['rounds']} rounds, and below it the least and the most"] * (c["rounds"] > 1),
            warmed(c | ({"batch": "batch"} if "batch" in swept else {})),
        ]

    def to_json(self) -> dict[str, Any]:
        policies = [self._to_map(result) for result in self.results]
        notes = routing_notes(self.config["model"])
        return {"config": self.config, "policies": policies, "emulation": self.emulation, "notes": notes}

    def _to_map(self, result: PolicyResult) -> dict[str, Any]:
        figures = {
            name: result.figures(name)
            for name in (*SPREAD, "moved_bytes", "moved_bytes_per_token", "host_share")
        }
        return {
            "name": result.request.name,
            "options": result.request.options,
            "exact": result.exact,
            **{
                name: {"median": median(runs), "min": min(runs), "max": max(runs), "runs": runs}
                if name in SPREAD
                else median(runs)
                for name, runs in figures.items()
            },
            "prefill_ratio": result.ratio(self.results[0], "prefill_tok_s"),
            "decode_ratio": result.ratio(self.results[0], "decode_tok_s"),
            "notes": result.notes,
            "decode": _profile_to_map(result, result.decode(self.config["tile_bytes"])),
        }

    def draw(self, path: Path) -> None:
        """Write the picture. Raises OutputFailed."""
        c = self.config
        cache = "" if c.get("expert_cache") is None else f", expert cache {percent(c['expert_cache'])}"
        heading = (
            f"{self.model_name} on {c['device']}: experts {c['format']}{cache}\n"
            f"batch {c['batch']}, {count(c['prompt_len'], 'prompt token')}, {c['gen_len']} generated;"
            f" bars: median of {count(c['rounds'], 'round')}, lines: range"
        )
        heading += f"; emulated: {self.emulation}" if self.emulation else ""
        footnote = f"{c.get('machine', '')}, {c.get('when', '')[:10]}".strip(", ")
        draw(path, policy_panels(self.figures), heading, footnote)


def _profile_to_map(result: PolicyResult, profile: PhaseProfile) -> dict[str, Any]:
    """For JSON: shares are 0..1, bytes are per token."""
    rows = max(profile.rows, 1)
    return {
        "hit_rate": profile.hit_rate,
        "hit_rate_by_layer": profile.hit_rates,
        "tile_hit_rate": profile.tile_hit_rate,
        "bytes_per_token": {kind: size / rows for kind, size in profile.moved.items()}
        | {"placed": result.placed_bytes},
        "prefetches": {
            "wanted": profile.tree["wanted_experts"],
            "issued": profile.tree["issued_experts"],
            "share": profile.issued_share,
            "paused_steps": profile.tree["paused_steps"],
        },
        "host_busy": profile.host_busy,
        "device_busy": profile.device_busy,
        "shares": profile.shares,
        "fidelity": {"exact": result.exact, **profile.fidelity},
        "channels_read": profile.kept_share,
        "channels": None if profile.channels is None else profile.channels._asdict(),
        "perplexity": None if result.perplexity is None else result.perplexity.to_map(),
    }


def _cache(config: dict[str, Any]) -> str:
    if config["cache_tiles"] is None:
        return "expert cache: none"
    size = byte_size(config["cache_tiles"] * config["tile_bytes"])
    share = "" if config["expert_cache"] is None else f", {percent(config['expert_cache'])} of all tiles"
    return f"expert cache: {config['cache_tiles']} tiles, {size}{share}"


def warmed(config: dict[str, Any]) -> str:
    """What each policy computes before it is measured."""
    read, new = config["warm_up_tokens"]
    lengths = f"{config['batch']} x {read} other tokens, {new} generated"
    return f"warm-up before each run, for all alike: {lengths}"


def placed_by(config: dict[str, Any]) -> list[str]:
    """What policies went by that lack a calibration, if any did."""
    names = config.get("uncalibrated")
    if not names:
        return []
    used = f"experts placed by their use in {config['counted_tokens']} tokens of other text"
    return [f"{', '.join(names)}: not calibrated, {used}"]
