"""The kernels that compute experts of each format, and why faster ones are not used."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from launch.doctor.finding import Finding, Topic
from launch.doctor.software import pip_install
from launch.processes.kernel_choice import choice_of, exchange_of
from launch.terminal.format import rate
from shm.blocks import BlockFormat
from shm.formats import BF16
from shm.layout import DENSE
from shm.quantize import library as quantizer
from workers.interpreter import ROOT
from workers.kernels.native import VARIANTS, Library, chosen, load
from workers.kernels.tuning import MATRIX_UNITS, Tuning
from workers.kernels.tuning_file import Record, path_of

TOPIC = Topic("kernels")


def inspect(record: Record | None = None, cache: Path = Path()) -> list[Finding]:
    """`record`: the measured choice, kept in this cache folder; None: the default one is used."""
    choice = choice_of(None if record is None else record.tuning)
    found = [*explain({name: load(name) for name in VARIANTS}, chosen(choice), quantizer() is not None)]
    if record is None:
        return found
    path = path_of(cache, record.machine)
    if record.tuning is None:
        return [*found, not_tuned(record, path)]
    return [*found, tuned(record, record.tuning, path), *exchanged(record.tuning)]


def not_tuned(record: Record, path: Path) -> Finding:
    means = f"the usual choice is used, which may be slower; kept in {path}, tried again after a day"
    return TOPIC.note(f"the kernels could not be measured: {record.failure}", means)


def exchanged(tuning: Tuning) -> Iterator[Finding]:
    """Tells what carries work to the workers where `--exchange` is `auto`."""
    words = {"shm": "shared memory", "zmq": "sockets"}
    trips = sorted((seconds, words[name]) for name, seconds in tuning.round_trips.items())
    if trips:
        means = "a Work and its answer take " + ", ".join(
            f"{1e6 * s:.0f} us through {way}" for s, way in trips
        )
        yield TOPIC.ok(f"work gets to the workers through {words[exchange_of('auto', 1, tuning)]}", means)


def tuned(record: Record, of: Tuning, path: Path) -> Finding:
    """Tells what was measured for one row, and how to measure it again."""
    choice = of.choice
    units = f", from {choice.matrix_rows} rows on by matrix units" if choice.variant in MATRIX_UNITS else ""
    found = f"one row, measured: {VARIANTS[choice.variant]}, {choice.prefetch}{units}"
    here = ", ".join(f"{name} {rate(speed)}" for name, speed in of.rates.items())
    usual = ", ".join(f"{name} {rate(speed)}" for name, speed in of.default.items())
    means = f"one core reads {here}" + (f"; the default choice {usual}" if of.rates != of.default else "")
    day = time.strftime("%Y-%m-%d", time.localtime(record.measured))
    means += f"\nmeasured {day}, kept in {path}; without the file, a start measures again"
    if record.loaded:
        means = f"other programs were computing (load average {record.load:.1f}): it may be wrong\n{means}"
        return TOPIC.note(found, means, "a start at half of that load or less measures again")
    return TOPIC.ok(found, means)


def explain(variants: dict[str, Library | str], chosen: Library | None, quantizer: bool) -> Iterator[Finding]:
    """`variants`: each one's library, or why it cannot run, best first; `chosen`: the one that is used."""
    compiled = [name for name, kind in DENSE.items() if isinstance(kind, BlockFormat | BF16)]
    other = [name for name in DENSE if name not in compiled]
    fix = "install a C compiler (Debian, Ubuntu: sudo apt install gcc)\n" + pip_install(f"-e {ROOT}")
    if chosen is None:
        reasons = ", ".join(f"{VARIANTS[name]} ({reason})" for name, reason in variants.items())
        means = "experts of every format are computed through torch, the quantized ones much slower"
        yield TOPIC.note(f"no compiled kernels: {reasons}", means, fix)
    else:
        means = "for any number of rows, directly from the stored bytes"
        yield TOPIC.ok(f"{', '.join(compiled)}: {VARIANTS[chosen.variant]}", means)
        yield TOPIC.ok(f"{', '.join(other)}: torch", "a reference for comparisons")
        unused = {name: loaded for name, loaded in variants.items() if name != chosen.variant}
        reasons = ", ".join(
            f"{VARIANTS[name]} ({loaded if isinstance(loaded, str) else 'not faster'})"
            for name, loaded in unused.items()
        )
        yield TOPIC.ok(f"not used: {reasons}", "one that was not compiled may be faster, if it is supported")
    if not quantizer:
        means = "the first start of a model quantizes it with numpy, which takes much longer"
        yield TOPIC.note("the quantizer is not compiled", means, fix)
