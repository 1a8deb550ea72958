"""The report of `advise`: one JSON object, or tables that fit 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from launch.advise.hardware import Hardware
from launch.advise.search import Advice, Fitting, best_of
from launch.bench.replay import ASSUMPTION
from launch.forecast import Estimate, RecordedText
from launch.terminal.format import MISSING, alike, count, merged_notes, model_name, percent, three_digits
from launch.terminal.tables import make_table, policy_name, render
from pipeline.checkpoint.model_source import ModelSource
from pipeline.config import EngineConfig
from shm.segment import SHM_FOLDER, byte_size

SHOWN = 8  # presets of the best format
CLOSE = 0.95  # of the fastest: as good, where the format is more exact


@dataclass(frozen=True)
class Report:
    """All that was found, and its settings."""

    source: ModelSource
    hardware: Hardware
    config: EngineConfig
    text: RecordedText
    prompt: int
    batch: int
    advice: Advice

    def to_json(self) -> dict[str, Any]:
        advice = self.advice
        return {
            "model": self.source.name,
            "machine": self.hardware.words,
            "routing": self.text.words,
            "prompt_len": self.prompt,
            "batch": self.batch,
            "advice": [self._command(each) for each in self._recommended()],
            "formats": [self._format_map(each) for each in advice.formats],
            "estimates": [each.to_map() for each in advice.estimates],
            "changes": [vars(change) for change in advice.changes],
            "curves": advice.curves,
            "left_out": [{"policy": name, "reason": why} for name, why in advice.left_out.items()],
            "unknown": self._unknown(),
        }

    def _format_map(self, fitting: Fitting) -> dict[str, Any]:
        pools = fitting.plan.pools(self.hardware.memory)
        return {
            "format": fitting.sizes.format,
            "fits": fitting.fits,
            "context": fitting.plan.context,
            "expert_cache": fitting.plan.expert_cache,
            "memory": [
                {"name": pool.name, "needed": pool.needed, "parts": dict(pool.parts)} for pool in pools
            ],
        }

    def render(self) -> str:
        model = model_name(self.source.name, article="")
        shape = self.advice.formats[0].sizes.header.shape
        experts = f"{shape.layers} layers of {count(shape.experts, 'expert')}, {shape.top_k} a token"
        head: list[RenderableType] = [
            Text(model, style="bold"),
            Text(experts),
            Text(self.hardware.words),
            Text(f"{self.text.words}; {self._load}"),
            "",
        ]
        if not self.advice.estimates:
            return render(*head, self._formats(), "", Text("It does not fit.", style="bold red"))
        return render(
            *head, self._formats(), "", self._presets(), "", *self._answer(), "", *self._footnotes()
        )

    @property
    def _load(self) -> str:
        return f"prompt of {self.prompt} tokens, {count(self.batch, 'request')} at once"

    def _formats(self) -> Table:
        """Each format's memory and its fastest presets."""
        gpu = self.hardware.memory.gpu is not None
        names = (*("GPU",) * gpu, "host", *("cache",) * gpu, "tok/s", "first\ntoken")
        table = make_table("format", "fastest exact preset", numbers=names, gap=0)
        best = [self._fastest(each) for each in self.advice.formats]
        speeds = iter(alike([each.tok_s for each in best if each is not None]))
        chosen = self.advice.best if self.advice.estimates else None
        for fitting, each in zip(self.advice.formats, best, strict=True):
            pools = fitting.plan.pools(self.hardware.memory)
            needed = {pool.name: byte_size(pool.needed) for pool in pools if pool.name != SHM_FOLDER}
            short = ", ".join(
                f"{pool.name} too small" for pool in pools if pool.short and pool.name != SHM_FOLDER
            )
            table.add_row(
                fitting.sizes.format,
                policy_name(each.setting.policy, each.exact)
                if each is not None
                else f"does not fit: {short}",
                *([needed["GPU memory"]] if gpu else []),
                needed["memory"],
                *(f"{fitting.plan.expert_cache:.0%}" if fitting.fits else MISSING,) * gpu,
                next(speeds) if each is not None else MISSING,
                _seconds(each.first_token_s) if each is not None else MISSING,
                style="bold" if each is not None and each is chosen else "",
            )
        return table

    def _fastest(self, fitting: Fitting) -> Estimate | None:
        estimates = self.advice.of(fitting.sizes.format)
        return best_of(estimates) if estimates else None

    def _presets(self) -> Table:
        """The presets of the best setting's format."""
        best = self.advice.best
        estimates = self.advice.of(best.setting.format)[:SHOWN]
        names = (
            "tok/s",
            "x",
            "first\ntoken",
            "hits",
            "host",
            "moved/\ntoken",
            "wait\nlink",
            "wait\nhost",
            "weight\nchanged",
        )
        table = make_table(f"policy, {best.setting.format}", numbers=names, gap=0)
        for each, speed in zip(estimates, alike([each.tok_s for each in estimates]), strict=True):
            table.add_row(
                policy_name(each.setting.policy, each.exact),
                speed,
                f"{each.tok_s / best.tok_s:.2f}",
                _seconds(each.first_token_s),
                percent(each.hit_rate),
                percent(each.host_share),
                byte_size(round(each.moved)),
                percent(each.wait_link),
                percent(each.wait_host),
                _changed(each),
                style="bold" if each is best else "",
            )
        return table

    def _recommended(self) -> list[Estimate]:
        """The fastest; then what is fastest in each format that is more exact, where that is another one."""
        if not self.advice.estimates:
            return []
        best = self.advice.best
        advised = [best]
        for fitting in self.advice.formats:
            each = self._fastest(fitting)
            if each is best:
                break
            if each is not None and each.exact:
                return [each] if each.tok_s >= CLOSE * best.tok_s else [best, each]
        return advised

    def _command(self, each: Estimate) -> str:
        setting = each.setting
        words = [f"--policy {setting.policy.name}"]
        words += [
            f"--set {setting.policy.name}.{name}={value}" for name, value in setting.policy.options.items()
        ]
        words.append(f"--format {setting.format}")
        if each.setting.capacity and (each.host_share < 1 or each.moved):
            words.append(f"--expert-cache {setting.share:.3g}")
        return " ".join(words)

    def _answer(self) -> Iterator[Text]:
        first, *others = self._recommended()
        yield Text("Advice", style="bold green")
        yield Text(f"  {self._command(first)}", style="bold")
        yield Text(f"  about {three_digits(first.tok_s)} tok/s")
        for each in others:
            yield Text(f"or with more exact weights, about {three_digits(each.tok_s)} tok/s:")
            yield Text(f"  {self._command(each)}")
        yield Text("")
        yield Text("What would change its speed", style="bold")
        for change in self.advice.changes:
            yield Text(f"  {change.words:32} {100 * (change.ratio - 1):+.0f} %")

    def _unknown(self) -> list[str]:
        lines = [*self.hardware.unknown, *self.text.unknown]
        if self.text.rest is None:
            lines.append("time of planning and of messages between processes, which a busy host lengthens")
        lines.append("other programs on the machine, heat, contexts longer than the prompt")
        if any(not each.exact for each in self.advice.estimates):
            lines.append(f"{ASSUMPTION}; bench measures their perplexity")
        return lines

    def _footnotes(self) -> Iterator[Text]:
        yield Text("What this does not know", style="bold")
        for line in self._unknown():
            yield Text(f"- {line}", style="dim")
        best = self.advice.best.setting.format
        notes = merged_notes((each.setting.policy.name, each.notes) for each in self.advice.of(best)[:SHOWN])
        for note in notes:
            yield Text(f"note: {note}", style="dim")
        for name, reason in self.advice.left_out.items():
            yield Text(f"note: {name} left out: {reason}", style="dim")


def _changed(each: Estimate) -> str:
    """The share of the routed weight that is computed otherwise."""
    if each.exact:
        return "exact"
    changed = sum(share or 0 for kind, share in each.fidelity.items() if kind != "predicted")
    return percent(changed) if changed else "predicted"


def _seconds(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{three_digits(value)} s" if value >= 1 else f"{1e3 * value:.0f} ms"
