"""`launch.py advise`: which preset, expert cache and format for a model, and how fast it would be.
Nothing of the model is loaded: presets are replayed on routing, with the costs of a machine.
Exit code 0: the model fits in some format, and a preset can be used; 1: not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from launch.advise.machine import Hardware, elsewhere, recorded, this_machine
from launch.advise.search import Fitting, Search, fitting
from launch.bench.plan import requested_policies
from launch.command_line.checks import check_engine, check_one_device
from launch.command_line.options import Options
from launch.errors import WrongUsage
from launch.forecast import Estimate, Sizes, drawn, sizes_of
from launch.planning import every_format, host_memory, room_for_experts, second_roundings
from launch.profile import shown_hits
from launch.terminal.format import alike, merged_notes, model_name, percent, three_digits
from launch.terminal.interrupts import Interrupts
from launch.terminal.output import print_json
from launch.terminal.progress import ProgressCounter
from launch.terminal.tables import Column, Table, dim, each, policy_name, print_parts
from pipeline.assets import model_dir
from pipeline.checkpoint.open import open_config
from pipeline.config import EngineConfig
from pipeline.memory.needs import CHUNK_MAX, LAYERS_IN_MEMORY, Needs
from pipeline.memory.plan import automatic
from shm.segment import SHM_FOLDER, byte_size

PROMPT = 128  # tokens, as bench
SHOWN = 8  # presets of the best format


async def advise(options: Options, interrupts: Interrupts) -> int:
    """Run `advise`. Raises UsageError, WrongUsage, TraceError, PolicyError."""
    written, asked = options.written, options.config()
    prompt = written.get("prompt_len", PROMPT)
    batch = written.get("batch", 1)
    requests = requested_policies(options, asked.seed)
    hardware = elsewhere(written)
    if batch > 1 and (hardware is None or "trace" in written):
        raise WrongUsage("--batch: several requests are drawn, of a described machine, without --trace")
    check_one_device(asked, "advise")
    if asked.host_memory is not None and hardware is not None and not hardware.disk:
        raise WrongUsage("--host-memory: a machine that is not here needs --disk-gbps as well")
    source = open_config(written.get("model", model_dir()))

    def sizes(config: EngineConfig) -> list[Sizes]:
        names = automatic(source) if asked.format is None else (asked.format,)
        return [sizes_of(source, config, needs.format) for needs in every_format(source, config, names)]

    if hardware is not None:
        config = replace(asked, device=hardware.device, workers=1 if asked.workers is None else asked.workers)
        config = on_its_disk(sizes(config), config, hardware)
        every = sizes(config)
        header, chunk = every[0].header, min(config.chunk or CHUNK_MAX, prompt)
        path = written.get("trace")
        text = recorded(path, header) if path else drawn(header, prompt, chunk, config.seed, batch)
    else:
        check_engine(asked, source)
        hardware, config, text = await this_machine(options, interrupts, source, prompt)
        every = sizes(config)
    formats = [fitting(each, config, hardware) for each in every]
    total = sum(one.fits for one in formats) * len(requests)
    with ProgressCounter("advise: replays", total) as bar:
        search = Search(hardware, formats, text, prompt, config.seed, bar.count)
        await search.presets(requests)
    best = search.best()
    if "json" in written:
        print_json(_to_json(source.name, search))
    else:
        print_parts(*_report(source.name, search, best))
    return 0 if best is not None else 1


def on_its_disk(every: Sequence[Sizes], config: EngineConfig, hardware: Hardware) -> EngineConfig:
    """Returns the configuration with as many experts in memory as find room on a machine that is not here,
    where none of these formats fits and its disk is known."""
    if not hardware.disk or config.host_memory is not None:
        return config
    if any(fitting(each, config, hardware).fits for each in every):
        return config
    room = room_for_experts(every[-1].needs, config, hardware.memory, slab=True)
    return replace(config, host_memory=room or None)


def _to_json(model: str, search: Search) -> dict[str, Any]:
    return {
        "model": model,
        "machine": search.hardware.words,
        "routing": search.text.words,
        "prompt_len": search.prompt,
        "advice": [_command(estimate) for estimate in search.recommended()],
        "formats": [_format_map(fitting, search) for fitting in search.formats],
        "estimates": [estimate.to_map() for estimate in search.estimates],
        "left_out": [{"policy": name, "reason": why} for name, why in search.left_out.items()],
    }


def _format_map(fitting: Fitting, search: Search) -> dict[str, Any]:
    pools = fitting.plan.pools(search.hardware.memory)
    return {
        "format": fitting.sizes.format,
        "fits": fitting.fits,
        "context": fitting.plan.context,
        "expert_cache": fitting.plan.expert_cache,
        "memory": [{"name": pool.name, "needed": pool.needed, "parts": dict(pool.parts)} for pool in pools],
    }


def _report(model: str, search: Search, best: Estimate | None) -> Iterator[RenderableType]:
    """Yields the tables and lines of the report."""
    shape = search.formats[0].sizes.header.shape
    yield Text(model_name(model, article=""), style="bold")
    yield f"{shape.layers} layers of {shape.experts} experts, {shape.top_k} a token"
    yield from (search.hardware.words, f"{search.text.words}; prompt of {search.prompt} tokens", "")
    yield from (_formats(search), "")
    left_out = [f"{name} left out: {reason}" for name, reason in search.left_out.items()]
    if best is None and left_out:
        yield Text("It fits, and none of these policies can be used.", style="bold red")
        yield from left_out
        return
    if best is None:
        yield Text("It does not fit.", style="bold red")
        if not search.hardware.disk:
            yield "With --disk-gbps X its experts may be read from disk."
        elif not any(of.plan.needs.partial for of in search.formats):
            yield _least_in_memory(search.formats[-1].plan.needs)
        return
    estimates = search.of(best.setting.format)[:SHOWN]
    yield from (_presets(best, estimates), "")
    first, *others = search.recommended()
    yield Text("Advice", style="bold green")
    yield Text(f"  {_command(first)}", style="bold")
    yield f"  about {three_digits(first.tok_s)} tok/s"
    for other in others:
        yield f"or with more exact weights, about {three_digits(other.tok_s)} tok/s:"
        yield f"  {_command(other)}"
    yield ""
    notes = merged_notes((estimate.setting.policy.name, estimate.notes) for estimate in estimates)
    notes += left_out
    again = (line for of in search.formats if of.fits for line in second_roundings(of.plan.needs))
    notes += dict.fromkeys(again)  # of other matrices than experts the same for each format
    notes += [
        f"{needs.format}: {byte_size(needs.store)} of the experts' {byte_size(needs.whole)} are in memory; a"
        " token waits for what it reads of the others from disk"
        for needs in (of.plan.needs for of in search.formats if of.fits)
        if needs.partial
    ]
    yield from dim(f"note: {note}" for note in notes)


def _least_in_memory(needs: Needs) -> str:
    """Tells what would have to fit for experts to be read from disk."""
    least = byte_size(LAYERS_IN_MEMORY * needs.layer)
    return (
        f"With experts on disk those of two layers must fit into memory ({least} in {needs.format}), or what"
        " --host-memory asks for."
    )


def _formats(search: Search) -> Table[Fitting]:
    """Returns each format's memory and its fastest preset."""
    memory = search.hardware.memory
    fastest = {each.sizes.format: search.best(each.sizes.format) for each in search.formats}

    def best(of: Fitting) -> Any:
        return fastest[of.sizes.format]

    def preset(of: Fitting) -> Text | str:
        none = "none can be used" if of.fits else "does not fit"
        return _policy(best(of)) if best(of) else none

    def pool(name: str) -> Column[Fitting]:
        needed = {
            of.sizes.format: pool.needed
            for of in search.formats
            for pool in of.plan.pools(memory)
            if pool.name == name
        }
        return Column(name, lambda of: byte_size(needed[of.sizes.format]))

    pools = [pool.name for pool in search.formats[0].plan.pools(memory) if pool.name != SHM_FOLDER]
    columns = [
        Column[Fitting]("format", lambda of: of.sizes.format, text=True),
        Column[Fitting]("fastest exact preset", preset, text=True),
        *map(pool, pools),
        Column[Fitting]("cache", lambda of: percent(of.plan.expert_cache if of.fits else None)),
        Column[Fitting]("tok/s", lambda of: best(of) and best(of).tok_s, alike),
        Column[Fitting]("first\ntoken", lambda of: best(of) and best(of).first_token_s, each(_seconds)),
    ]
    return Table(columns, search.formats, gap=0)


def _presets(best: Estimate, estimates: Sequence[Estimate]) -> Table[Estimate]:
    """Returns the presets of the best setting's format."""
    on_disk = best.setting.host_memory is not None
    disk = [Column[Estimate]("wait\ndisk", lambda of: of.wait_disk, each(percent))] * on_disk
    columns = [
        Column[Estimate](f"policy, {best.setting.format}", _policy, text=True),
        Column[Estimate]("tok/s", lambda of: of.tok_s, alike),
        Column[Estimate]("first\ntoken", lambda of: of.first_token_s, each(_seconds)),
        Column[Estimate]("hits", lambda of: shown_hits(of.hit_rate, of.setting.policy)),
        Column[Estimate]("host", lambda of: of.host_share, each(percent)),
        Column[Estimate]("moved/\ntoken", lambda of: byte_size(round(of.moved))),
        Column[Estimate]("wait\nlink", lambda of: of.wait_link, each(percent)),
        Column[Estimate]("wait\nhost", lambda of: of.wait_host, each(percent)),
        *disk,
        Column[Estimate]("plan-\nning", lambda of: of.planning, each(percent)),
        Column[Estimate]("weight\nchanged", _changed),
    ]
    return Table(columns, estimates, gap=0, style=lambda of: "bold" if of is best else "")


def _policy(estimate: Estimate) -> Text:
    return policy_name(estimate.setting.policy, estimate.exact)


def _command(estimate: Estimate) -> str:
    """Returns the options of a setting."""
    setting, policy = estimate.setting, estimate.setting.policy
    words = [f"--policy {policy.name}"]
    words += [f"--set {policy.name}.{name}={value}" for name, value in policy.options.items()]
    words.append(f"--format {setting.format}")
    if setting.capacity and (estimate.host_share < 1 or estimate.moved):
        words.append(f"--expert-cache {setting.share:.3g}")
    if setting.host_memory is not None:
        words.append(host_memory(setting.host_memory))
    return " ".join(words)


def _changed(estimate: Estimate) -> str:
    """Returns the share of the routed weight that is computed otherwise."""
    if estimate.exact:
        return "exact"
    changed = sum(share or 0 for kind, share in estimate.fidelity.items() if kind != "predicted")
    return percent(changed) if changed else "predicted"


def _seconds(value: float) -> str:
    return f"{three_digits(value)} s" if value >= 1 else f"{1e3 * value:.0f} ms"
