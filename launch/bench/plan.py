"""The arguments of `bench`, checked before an engine is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.bench.sweep import combinations
from launch.command_line.options import Options
from launch.errors import WrongUsage
from launch.terminal.plot import check_picture
from pipeline.assets import model_dir
from pipeline.checkpoint.open import open_model
from pipeline.config import DEFAULT_CONTEXT, KV_BLOCK, KV_CONTEXTS, EngineConfig
from pipeline.memory.needs import whole_blocks
from pipeline.models.facts import facts_of
from pipeline.policies.presets import PRESETS, RandomPlan, make_policy
from pipeline.policies.view import PolicyRequest

WARM_UP_PROMPT = 64  # tokens: enough to use nearly every expert
# New tokens, unless a policy needs more until it has settled: 16 of DALI's windows of 4 steps, which exchange
# a whole layer's cache, and 4 of the windows in which predictions are judged.
WARM_UP_NEW = 64
PPL_TOKENS = 256  # enough to see a tenth of a percent; a few seconds for each approximate policy


@dataclass(frozen=True)
class BenchPlan:
    """Lengths in tokens; `ppl_tokens` of held-out text are scored for each approximate policy, 0 for none."""

    policies: tuple[PolicyRequest, ...]
    named: bool  # by --policy; otherwise a policy that cannot run here is left out
    prompt_len: int
    gen_len: int
    batch: int
    rounds: int
    ppl_tokens: int
    plot: Path | None
    seed: int

    @classmethod
    def of(cls, options: Options) -> BenchPlan:
        """Raises WrongUsage; UsageError for a policy, or a model's config, that cannot be used."""
        config, written = options.config(), options.written
        plan = cls(
            tuple(requested_policies(options, config.seed)),
            named="policy" in written,
            prompt_len=written.get("prompt_len", 128),
            gen_len=written.get("gen_len", 64),
            batch=written.get("batch", 1),
            rounds=written.get("rounds", 5),
            ppl_tokens=written.get("ppl_tokens", PPL_TOKENS),
            plot=written.get("plot"),
            seed=config.seed,
        )
        if plan.batch > config.max_sequences:
            raise WrongUsage(f"--batch {plan.batch}: an engine runs {config.max_sequences} requests at once")
        if config.record is not None:
            plan = replace(plan, policies=_recordable(plan.policies, plan.named, config.seed))
        if plan.plot is not None:
            check_picture(plan.plot)
        if not options.connect:
            # Checked before a large model is loaded.
            facts = facts_of(open_model(config.model or model_dir()).config)
            context = config.context or min(facts.max_positions, DEFAULT_CONTEXT)
            plan.check_lengths(context, config.kv_tokens or KV_CONTEXTS * context)
        return plan

    def check_lengths(self, context: int, kv_tokens: int) -> None:
        """Raises WrongUsage where the requests do not fit an engine of this context and KV cache."""
        tokens = self.prompt_len + self.gen_len
        if tokens > context:
            raise WrongUsage(
                f"--prompt-len {self.prompt_len} and --gen-len {self.gen_len} make {tokens} tokens, and the"
                f" context is {context}; use shorter ones"
            )
        needed, there = self.batch * whole_blocks(tokens), whole_blocks(kv_tokens)
        if needed > there:
            raise WrongUsage(
                f"--batch {self.batch} of {tokens} tokens each needs {needed} tokens of KV cache, in blocks"
                f" of {KV_BLOCK}, and it holds {there}; use fewer or shorter requests, or more --kv-tokens"
            )

    @property
    def runs(self) -> int:
        """The number of runs of all policies, the uncounted round among them."""
        return len(self.policies) * (1 + self.rounds)

    def warm_up(self, context: int) -> tuple[int, int]:
        """Prompt and new tokens of each request before a run, as far as the context has them: the same under
        every policy."""
        prompt = min(WARM_UP_PROMPT, context // 2)
        settled = [make_policy(request, self.seed).settles for request in self.policies]
        return prompt, min(max(WARM_UP_NEW, *settled), context - prompt)

    def order(self, turn: int) -> list[int]:
        """Indices of the policies: every other round is reversed, so that a steady drift cancels out."""
        forwards = range(len(self.policies))
        return list(reversed(forwards) if turn % 2 else forwards)


def _recordable(requests: Sequence[PolicyRequest], named: bool, seed: int) -> tuple[PolicyRequest, ...]:
    """Returns those that run every layer's router, which a replay needs. Raises WrongUsage for another named
    one."""
    unable = [request for request in requests if not make_policy(request, seed).runs_all_routers]
    if unable and named:
        name = unable[0].name
        raise WrongUsage(
            f"--record: a recording of {name} cannot be replayed, because it predicts layers without running"
            f" their routers; leave {name} out, or add --set {name}.predict=0"
        )
    return tuple(request for request in requests if request not in unable)


def requested_policies(options: Options, seed: int) -> list[PolicyRequest]:
    """Returns those of --policy, else every preset but the one for tests. Raises WrongUsage, PolicyError."""
    requests = options.policies() or [PolicyRequest(name) for name in PRESETS if name != RandomPlan.name]
    if not all(request.name for request in requests):
        raise WrongUsage(f"--policy {options.written['policy']}: a name is missing; write it as a,b,c")
    for request in requests:
        if (times := requests.count(request)) > 1:
            raise WrongUsage(
                f"--policy: {request.label} is named {times} times; once is enough, or with other options,"
                f" as {request.name}:option=value"
            )
    for request in requests:
        make_policy(request, seed)
    return requests


@dataclass(frozen=True)
class Comparison:
    """One combination of settings; `options`: the command line with them instead of --sweep."""

    settings: dict[str, Any]
    options: Options
    plan: BenchPlan


def comparisons(options: Options) -> list[Comparison]:
    """All, with an engine that is large enough for each. Raises WrongUsage; UsageError as BenchPlan.of."""
    pairs = list(combinations(options))
    if not options.connect:
        # How often guesses come true is the texts', not a policy's.
        pairs = [(of, replace(each, written={"speculate": "off"} | each.written)) for of, each in pairs]
        pairs = _in_one_size(pairs)
    if "sweep" in options.written:  # perplexities only where asked for: they would take most of the time
        pairs = [(of, replace(o, written={"ppl_tokens": 0} | o.written)) for of, o in pairs]
    return [Comparison(of, each, BenchPlan.of(each)) for of, each in pairs]


def _in_one_size(pairs: Sequence[tuple[dict[str, Any], Options]]) -> list[tuple[dict[str, Any], Options]]:
    """Give every batch and length the same engine, so that only the cache's size needs another one."""
    written = [options.written for _, options in pairs]
    batches = [given.get("batch", 1) for given in written]
    longest = [
        max(given.get("prompt_len", 128) + given.get("gen_len", 64), WARM_UP_PROMPT + WARM_UP_NEW)
        for given in written
    ]
    size: dict[str, Any] = {"max_sequences": max(EngineConfig.max_sequences, *batches)}
    if max(batches) > EngineConfig.max_sequences:
        needed = (b * whole_blocks(tokens) for b, tokens in zip(batches, longest, strict=True))
        size["kv_tokens"] = max(needed)
    return [(of, replace(options, written=size | options.written)) for of, options in pairs]
