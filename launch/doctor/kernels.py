"""The kernels that compute experts of each format, and why faster ones are not used."""

from __future__ import annotations

from collections.abc import Iterator

from launch.doctor.finding import Finding, Topic
from launch.doctor.software import pip_install
from shm.blocks import BlockFormat
from shm.formats import BF16
from shm.layout import DENSE
from shm.quantize import library as quantizer
from workers.kernels.native import VARIANTS, Library, best, load
from workers.lifetime import ROOT

TOPIC = Topic("kernels")


def inspect() -> list[Finding]:
    """Returns what computes here, and why faster kernels do not."""
    return [*explain({name: load(name) for name in VARIANTS}, best(), quantizer() is not None)]


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
