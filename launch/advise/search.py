"""The search: every preset in every format that fits, then what would change the best."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from launch.advise.hardware import Hardware
from launch.forecast import Estimate, Priced, RecordedText, Setting, Sizes, by_replay
from pipeline.config import EngineConfig, FormatName
from pipeline.errors import PlanError, PolicyError, TraceError
from pipeline.memory.limits import cache_tiles
from pipeline.memory.plan import Plan, plan_format, smallest
from pipeline.policies.view import PolicyRequest

# What stands in for presets that need a calibration where there is none.
UNCALIBRATED = {
    "dali": {"prediction": "next-gate"},
    "daop": {"placement": "popular"},
    "moepic": {"theta": "0.3"},
}
ALIKE = 0.98  # of the fastest: not to be told apart
DEFAULTS = ("all-host", "tandem", "fiddler")  # of several that are alike, the first of these
MORE = 1.1  # times as fast
MORE_CACHE = 2e9  # bytes
CURVE = (0.0, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0)  # caches of the picture
DRAWN = 4  # presets in it


@dataclass(frozen=True)
class Fitting:
    """A format, whether it fits, and with which plan of memory."""

    sizes: Sizes
    plan: Plan
    fits: bool


@dataclass(frozen=True)
class Change:
    """What a change of the machine would do to the best setting."""

    words: str
    tok_s: float  # of the same preset
    ratio: float


@dataclass
class Advice:
    """Estimates by falling speed, and what they rest on."""

    formats: list[Fitting]
    estimates: list[Estimate] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # preset: reason
    changes: list[Change] = field(default_factory=list)
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # preset: share, tok/s

    def of(self, format: FormatName) -> list[Estimate]:
        return [each for each in self.estimates if each.setting.format == format]

    @property
    def best(self) -> Estimate:
        """The best of all settings."""
        return best_of(self.estimates)


def best_of(estimates: Sequence[Estimate]) -> Estimate:
    """The fastest exact one, or one that is as fast within the error of any estimate and needs fewer words:
    without options, and the first of DEFAULTS."""
    exact = [each for each in estimates if each.exact] or list(estimates)
    fastest = max(each.tok_s for each in exact)
    return min((each for each in exact if each.tok_s >= ALIKE * fastest), key=_preference)


def _preference(each: Estimate) -> tuple[bool, int, float]:
    policy = each.setting.policy
    place = DEFAULTS.index(policy.name) if policy.name in DEFAULTS else len(DEFAULTS)
    return bool(policy.options), place, -each.tok_s


class Search:
    """Replays settings of one model on one machine, one after the other."""

    def __init__(
        self,
        hardware: Hardware,
        formats: Sequence[Fitting],
        text: RecordedText,
        prompt: int,
        seed: int,
        progress: Callable[[], None],
    ) -> None:
        self.advice = Advice(list(formats))
        self._hardware, self._text, self._prompt, self._seed = hardware, text, prompt, seed
        self._progress = progress
        self._fitting = {each.sizes.format: each for each in formats if each.fits}

    def priced(self, format: FormatName) -> Priced:
        return self._hardware.priced(self._fitting[format].sizes, self._prompt)

    async def presets(self, requests: Sequence[PolicyRequest]) -> None:
        """Each preset in each format, with the cache that fits."""
        for format, fitting in self._fitting.items():
            priced = self.priced(format)
            for request in requests:
                share = fitting.plan.expert_cache
                estimate = await self._try(request, fitting.sizes, priced, share)
                if estimate is not None:
                    self.advice.estimates.append(estimate)
        self.advice.estimates.sort(key=lambda each: -each.tok_s)

    async def what_if(self) -> None:
        """The best setting on a slightly better machine."""
        best = self.advice.best
        sizes = self._fitting[best.setting.format].sizes
        settings = best.setting
        plain = self.priced(settings.format)
        for side, words in (
            ("link", "the link"),
            ("host", "the host's memory"),
            ("device", "the GPU's memory"),
        ):
            if side == "device" and self._hardware.device == "cpu":
                continue
            self._changed(f"{words} 10 % faster", await self._run(settings, sizes, plain.faster(side, MORE)))
        tiles = sizes.needs.tiles
        more = min(tiles, settings.capacity + int(MORE_CACHE // sizes.needs.slot))
        if best.moved or best.host_share:
            estimate = await self._run(replace(settings, capacity=more, share=more / tiles), sizes, plain)
            self._changed(f"{MORE_CACHE / 1e9:g} GB more of expert cache", estimate)

    async def curve(self) -> None:
        """The fastest presets of the best setting's format over the cache's size."""
        best = self.advice.best.setting
        sizes, priced = self._fitting[best.format].sizes, self.priced(best.format)
        exact = [each for each in self.advice.of(best.format) if each.exact]
        for each in exact[:DRAWN]:
            points = self.advice.curves.setdefault(each.setting.policy.label, [])
            for share in CURVE:
                estimate = await self._run(_with(each.setting, share, sizes), sizes, priced)
                points.append((share, estimate.tok_s))

    def _changed(self, words: str, estimate: Estimate) -> None:
        self.advice.changes.append(Change(words, estimate.tok_s, estimate.tok_s / self.advice.best.tok_s))

    async def _try(
        self, request: PolicyRequest, sizes: Sizes, priced: Priced, share: float
    ) -> Estimate | None:
        """Replay a preset; None where it cannot be replayed here, which is noted."""
        reason = ""
        for each in _variants(request):
            setting = _with(Setting(each, sizes.format, 0, 0.0), share, sizes)
            try:
                return await self._run(setting, sizes, priced)
            except (PolicyError, TraceError, PlanError) as e:
                reason = reason or str(e)
        self.advice.left_out[request.label] = reason
        return None

    async def _run(self, setting: Setting, sizes: Sizes, priced: Priced) -> Estimate:
        await asyncio.sleep(0)  # lets the event loop handle a Ctrl-C
        estimate = by_replay(setting, sizes, priced, self._text, self._prompt, self._seed)
        self._progress()
        return estimate


def fitting(sizes: Sizes, config: EngineConfig, hardware: Hardware) -> Fitting:
    """The plan of a start there, or the smallest one where it does not fit."""
    plan = plan_format(sizes.needs, config, hardware.memory, slab=True)
    if plan is not None:
        return Fitting(sizes, plan, True)
    return Fitting(sizes, smallest(sizes.needs, config, slab=True), False)


def _with(setting: Setting, share: float, sizes: Sizes) -> Setting:
    return replace(setting, share=share, capacity=cache_tiles(share, sizes.needs.tiles))


def _variants(request: PolicyRequest) -> Iterator[PolicyRequest]:
    """The preset, then the same without its need of a calibration."""
    yield request
    without = UNCALIBRATED.get(request.name, {})
    if without and not without.keys() & request.options.keys():
        yield PolicyRequest(request.name, request.options | without)
