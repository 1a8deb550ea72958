"""The search of `advise`: every preset in every format that fits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from launch.advise.machine import Hardware
from launch.forecast import Estimate, Priced, Setting, Sizes, by_replay
from pipeline.config import EngineConfig, FormatName
from pipeline.errors import PlanError, PolicyError, TraceError
from pipeline.memory.needs import cache_tiles
from pipeline.memory.plan import Plan, plan_format, smallest
from pipeline.policies.view import PolicyRequest
from pipeline.replay.machine import DividedText

# What stands in for presets that need a calibration where there is none.
UNCALIBRATED = {
    "dali": {"prediction": "next-gate"},
    "daop": {"placement": "popular"},
    "moepic": {"theta": "0.3"},
}
ALIKE = 0.98  # of the fastest: not to be told apart
CLOSE = 0.95  # of the fastest: as good, where the format is more exact
DEFAULTS = ("all-host", "tandem")  # of several that are alike, the first of these


@dataclass(frozen=True)
class Fitting:
    """A format, whether it fits, and with which plan of memory."""

    sizes: Sizes
    plan: Plan
    fits: bool


class Search:
    """Replays settings of one model on one machine, one after the other. `estimates` by falling speed."""

    def __init__(
        self,
        hardware: Hardware,
        formats: Sequence[Fitting],
        text: DividedText,
        prompt: int,
        seed: int,
        progress: Callable[[], None],
    ) -> None:
        self.hardware, self.formats, self.text, self.prompt = hardware, formats, text, prompt
        self.estimates: list[Estimate] = []
        self.left_out: dict[str, str] = {}  # preset: reason
        self._seed, self._progress = seed, progress
        self._fitting = {each.sizes.format: each for each in formats if each.fits}

    def of(self, format: FormatName) -> list[Estimate]:
        return [each for each in self.estimates if each.setting.format == format]

    def best(self, format: FormatName | None = None) -> Estimate | None:
        """Returns the fastest exact estimate, of all or of one format, or one that is as fast within the
        error of any estimate and needs fewer words: without options, and the first of DEFAULTS."""
        estimates = self.estimates if format is None else self.of(format)
        exact = [each for each in estimates if each.exact] or estimates
        fastest = max((each.tok_s for each in exact), default=0.0)
        return min((each for each in exact if each.tok_s >= ALIKE * fastest), key=_preference, default=None)

    def recommended(self) -> list[Estimate]:
        """Returns the best, or one as good in a more exact format; then that of each more exact format that
        is faster than all still more exact ones, by falling speed. None where nothing fits."""
        best = self.best()
        if best is None:
            return []
        advised: list[Estimate] = []  # from the most exact format on
        for fitting in self.formats:
            each = self.best(fitting.sizes.format)
            if each is best:
                break
            if each is not None and each.exact and (not advised or each.tok_s > advised[-1].tok_s):
                advised.append(each)
                if each.tok_s >= CLOSE * best.tok_s:
                    return advised[::-1]
        return [best, *reversed(advised)]

    async def presets(self, requests: Sequence[PolicyRequest]) -> None:
        """Replay each preset in each format, with the cache that fits."""
        for fitting in self._fitting.values():
            priced = self._priced(fitting)
            for request in requests:
                await self._try(request, fitting, priced)
        self.estimates.sort(key=lambda each: -each.tok_s)

    async def _try(self, request: PolicyRequest, fitting: Fitting, priced: Priced) -> None:
        """Replay a preset, or the same without its need of a calibration; note where neither can be."""
        variants, sizes = [request], fitting.sizes
        without = UNCALIBRATED.get(request.name, {})
        if without and not without.keys() & request.options.keys():
            variants.append(PolicyRequest(request.name, request.options | without))
        reason = ""
        for each in variants:
            share, needs = fitting.plan.expert_cache, sizes.needs
            memory = needs.store if needs.partial else None
            setting = Setting(each, sizes.format, cache_tiles(share, needs.tiles), share, memory)
            try:
                self.estimates.append(await self._run(setting, sizes, priced))
                return
            except (PolicyError, TraceError, PlanError) as e:
                reason = reason or str(e)
        self.left_out[request.label] = reason

    def _priced(self, fitting: Fitting) -> Priced:
        priced = self.hardware.priced(fitting.sizes, self.prompt)
        return replace(priced, disk=self.hardware.disk)

    async def _run(self, setting: Setting, sizes: Sizes, priced: Priced) -> Estimate:
        await asyncio.sleep(0)  # lets the event loop handle a Ctrl-C
        estimate = by_replay(setting, sizes, priced, self.text, self.prompt, self._seed)
        self._progress()
        return estimate


def fitting(sizes: Sizes, config: EngineConfig, hardware: Hardware) -> Fitting:
    """Returns the plan of a start there, or the smallest one where it does not fit."""
    plan = plan_format(sizes.needs, config, hardware.memory, slab=True)
    if plan is not None:
        return Fitting(sizes, plan, True)
    return Fitting(sizes, smallest(sizes.needs, config, slab=True), False)


def _preference(each: Estimate) -> tuple[bool, int, float]:
    policy = each.setting.policy
    place = DEFAULTS.index(policy.name) if policy.name in DEFAULTS else len(DEFAULTS)
    return bool(policy.options), place, -each.tok_s
