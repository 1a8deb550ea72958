"""The machine to advise on: what a model's step costs there in each format, and the memory that it has. This
module describes machines by numbers or by a file of costs; `here.py` this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from launch.errors import WrongUsage
from launch.forecast import Priced, Sizes
from pipeline.config import DeviceName, FormatName
from pipeline.memory.plan import Machine
from pipeline.policies.costs import MACHINES, Costs, Rates, derived
from pipeline.policies.options import did_you_mean

GIGABYTE = 1e9
ENOUGH = 1 << 60  # bytes of memory, where none are given
GPU_GB = {"a100-pcie4": 80.0, "4090-pcie4": 24.0, "h200-pcie5": 141.0}
GPU_FREE = 0.96  # of a GPU's memory, beside the driver and a display
# Where only bandwidths are given: both are about what the named machines have.
HOST_TFLOPS_PER_GBPS, GPU_TFLOPS_PER_GBPS = 0.0125, 0.1
BESIDE_STEP = 5e-4  # seconds of a step between its last layer and the next step: sampling, messages
NUMBERS = ("host_gbps", "link_gbps", "gpu_gbps", "gpu_gb")  # which a machine needs
RATES = {"gpu_gbps": "device_gbps", "gpu_tflops": "device_tflops"}  # where an option's name is another


@dataclass(frozen=True)
class Hardware:
    """A machine to advise on."""

    words: str
    memory: Machine
    priced: Callable[[Sizes, int], Priced]  # for a model's sizes and the tokens that a token attends to
    unknown: list[str]  # what an estimate for it does not contain
    device: DeviceName = "cuda"
    only: FormatName | None = None  # the one format that it has costs of


def elsewhere(written: Mapping[str, Any]) -> Hardware | None:
    """The machine that the command line describes; None where it is this one. Raises WrongUsage,
    PolicyError."""
    given = {
        name: written[name] for name in (*NUMBERS, "host_gb", "host_tflops", "gpu_tflops") if name in written
    }
    known = written.get("machine")
    if not given and known is None and "costs" not in written:
        return None
    if known is not None and known not in MACHINES:
        near = did_you_mean(known, MACHINES)
        raise WrongUsage(f"--machine {known[:40]}: unknown{near} (supported: {', '.join(MACHINES)})")
    gpu_gb = given.get("gpu_gb", GPU_GB.get(known or ""))
    if "costs" in written:
        return _from_file(written, gpu_gb)
    missing = [name for name in NUMBERS if name not in given]
    if known is None and missing:
        options = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise WrongUsage(
            f"advise: a machine that is not here needs {options} as well, or --machine NAME"
            f" ({', '.join(MACHINES)}), or --costs FILE"
        )
    rates, guessed = _rates(given, None if known is None else MACHINES[known])
    assert gpu_gb is not None
    name = f"{known}: " if known else ""
    words = (
        f"{name}host memory {rates.host_gbps:g} GB/s, link {rates.link_gbps:g} GB/s, GPU of {gpu_gb:g} GB at"
        f" {rates.device_gbps:g} GB/s"
    )
    unknown = [
        "the rates are taken to be what programs reach, about 80 % of a data sheet's; the workers read what"
        " the link leaves of the host's memory",
        f"assumed: {1e6 * rates.layer:.0f} us a layer to start its kernels, {1e6 * rates.round_trip:.0f} us"
        f" for the exchange with the workers{guessed}",
        "small experts reach less than these rates: the fewer bytes in a layer, the more optimistic this is",
    ]

    def priced(sizes: Sizes, context: int) -> Priced:
        other = sizes.other + context * sizes.kv_token
        costs = derived(rates, sizes.expert, sizes.expert_weights, other, sizes.other_weights)
        costs = replace(costs, link=costs.link * sizes.header.tile_bytes / sizes.tile)
        rest = BESIDE_STEP + sizes.head / (rates.device_gbps * GIGABYTE)
        return Priced(costs.for_tiles(sizes.header.shape.tiles), rest, "derived from these rates")

    return Hardware(words, _memory(written, gpu_gb), priced, unknown)


def _rates(given: Mapping[str, float], base: Rates | None) -> tuple[Rates, str]:
    """The machine's rates, and which of them were guessed from others, in words."""
    named = {RATES.get(name, name): value for name, value in given.items()}
    values = {f.name: named[f.name] for f in fields(Rates) if f.name in named}
    if base is not None:
        return replace(base, **values), ""
    guessed = []
    for name, of, factor in (
        ("host_tflops", "host_gbps", HOST_TFLOPS_PER_GBPS),
        ("device_tflops", "device_gbps", GPU_TFLOPS_PER_GBPS),
    ):
        if name not in values:
            values[name] = factor * values[of]
            guessed.append(f"{'host' if name[0] == 'h' else 'GPU'} {values[name]:.3g}")
    return Rates(**values), f"; TFLOP/s: {', '.join(guessed)}" if guessed else ""


def _from_file(written: Mapping[str, Any], gpu_gb: float | None) -> Hardware:
    if gpu_gb is None:
        raise WrongUsage("advise --costs: give --gpu-gb as well, the size of that machine's GPU memory")
    others = [name for name in ("machine", "host_gbps", "link_gbps", "gpu_gbps") if name in written]
    if others:
        option = "--" + others[0].replace("_", "-")
        raise WrongUsage(f"advise: --costs FILE has what {option} would give; leave one of them out")
    path, only = written["costs"], written.get("format", "bf16")
    words, costs = f"costs: {path}, GPU of {gpu_gb:g} GB", Costs.load(path)
    unknown = [f"the costs are taken to be those of {only}, for which alone they hold"]
    unknown.append("embedding, head, sampling, planning and messages are not in the file, and not in this")

    def priced(sizes: Sizes, _: int) -> Priced:
        return Priced(costs.for_tiles(sizes.header.shape.tiles), 0.0, words)

    return Hardware(words, _memory(written, gpu_gb), priced, unknown, only=only)


def _memory(written: Mapping[str, Any], gpu_gb: float) -> Machine:
    host = int(written["host_gb"] * GIGABYTE) if "host_gb" in written else ENOUGH
    return Machine(memory=host, shm=host, gpu=int(GPU_FREE * gpu_gb * GIGABYTE))
