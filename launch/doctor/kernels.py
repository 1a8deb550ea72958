"""The kernels that compute experts of each format, and why faster ones are not used."""

from __future__ import annotations

from launch.doctor.finding import Finding
from launch.doctor.software import pip_install
from launch.processes.children import ROOT
from shm.blocks import BlockFormat
from shm.formats import BF16
from shm.layout import FORMATS
from shm.quantize import library as quantizer
from workers.kernels.host import BF16_ROWS
from workers.kernels.native import VARIANTS, Library, best, load

TOPIC = "kernels"


def inspect() -> list[Finding]:
    return explain({name: load(name) for name in VARIANTS}, best(), quantizer() is not None)


def explain(variants: dict[str, Library | str], chosen: Library | None, quantizer: bool) -> list[Finding]:
    """`variants`: each variant's library, or the reason why it cannot run, best first. `chosen`: the library
    that is used. `quantizer`: whether the quantizer is compiled."""
    grouped = [name for name, kind in FORMATS.items() if isinstance(kind, BlockFormat)]
    plain = [name for name, kind in FORMATS.items() if not isinstance(kind, BlockFormat | BF16)]
    fix = "install a C compiler (Debian, Ubuntu: sudo apt install gcc)\n" + pip_install(f"-e {ROOT}")
    found = []
    if chosen is None:
        of_reason: dict[str, list[str]] = {}
        for name, reason in variants.items():
            of_reason.setdefault(str(reason), []).append(VARIANTS[name])
        means = "experts of every format are computed through torch, the quantized ones much slower"
        what = "no compiled kernels: " + "; ".join(f"{', '.join(n)}: {r}" for r, n in of_reason.items())
        found.append(Finding(TOPIC, "note", what, means, fix))
    else:
        runs = VARIANTS[chosen.variant]
        means = "for any number of rows, directly from the stored bytes"
        found.append(Finding(TOPIC, "ok", f"{', '.join(grouped)}: {runs}", means))
        means = "for many rows torch's matrix product is faster"
        what = f"bf16: {runs} for up to {BF16_ROWS} rows, torch for more"
        found.append(Finding(TOPIC, "ok", what, means))
        found.append(Finding(TOPIC, "ok", f"{', '.join(plain)}: torch", "a reference for comparisons"))
        found += _others(variants, chosen)
    if not quantizer:
        means = "the first start of a model quantizes it with numpy, which takes much longer"
        found.append(Finding(TOPIC, "note", "the quantizer is not compiled", means, fix))
    return found


def _others(variants: dict[str, Library | str], chosen: Library) -> list[Finding]:
    """A finding for each variant that cannot run, with its reason, and one for those that could."""
    names = list(variants)
    found = []
    for name, loaded in variants.items():
        if isinstance(loaded, str):
            better = names.index(name) < names.index(chosen.variant)
            means = (
                "it may be faster, if this processor supports it" if better and "compiled" in loaded else ""
            )
            found.append(Finding(TOPIC, "ok", f"{VARIANTS[name]}: not used, {loaded}", means))
    able = [
        VARIANTS[n] for n, loaded in variants.items() if isinstance(loaded, Library) and n != chosen.variant
    ]
    if able:
        means = f"supported by this processor, but {VARIANTS[chosen.variant]} is faster"
        found.append(Finding(TOPIC, "ok", f"{', '.join(able)}: not used", means))
    return found
