"""A machine that is not here, by its numbers or by a file of costs: what a tile costs there in each format,
and the memory that it has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from launch.advise.sizes import Sizes
from launch.errors import WrongUsage
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
class Priced:
    """What a model's step costs on a machine in one format."""

    costs: Costs  # per tile
    rest: float  # seconds of a decode step outside its layers
    prefill_rest: float = 0.0  # seconds of a prefill step outside its layers
    words: str = ""  # where the costs come from
    planning: float = 0.0  # an engine's seconds of planning for a second of a replay's; 0: not known
    planned: float = 0.0  # seconds of a replay's step with the preset whose planning is in `rest`

    def rest_of(self, replayed: float) -> float:
        """`rest` of a preset whose replay takes so many seconds a step: what it has more than another one is
        planning."""
        return max(0.0, self.rest + self.planning * (replayed - self.planned))

    def faster(self, **factors: float) -> Priced:
        """With `link`, `host` or `device` so many times as fast."""
        costs = self.costs
        changed: dict[str, Any] = {}
        for name, factor in factors.items():
            value = getattr(costs, name)
            changed[name] = value / factor if name == "link" else tuple(each / factor for each in value)
        return replace(self, costs=replace(costs, **changed))


class Hardware(ABC):
    """A machine to advise on."""

    words: str
    device: DeviceName  # cuda or cpu
    memory: Machine
    only: FormatName | None = None  # the one format that it has costs of
    unknown: list[str]  # what an estimate for it does not contain
    without_workers: float | None = None  # times as fast is all-host with --workers 0, where measured

    @abstractmethod
    def priced(self, sizes: Sizes, context: int) -> Priced:
        """`context`: tokens that a token attends to."""

    def faster(self, side: str, factor: float, sizes: Sizes, context: int) -> Priced:
        """With a `link`, a `host` memory or a `device` that is so many times as fast."""
        return self.priced(sizes, context).faster(**{side: factor})


@dataclass
class Numbered(Hardware):
    """A machine given by rates."""

    words: str
    rates: Rates
    memory: Machine
    unknown: list[str] = field(default_factory=list)
    device: DeviceName = "cuda"

    def priced(self, sizes: Sizes, context: int) -> Priced:
        other = sizes.other + context * sizes.kv_token
        costs = derived(self.rates, sizes.expert, sizes.expert_weights, other, sizes.other_weights)
        costs = replace(costs, link=costs.link * sizes.header.tile_bytes / sizes.tile)
        rest = BESIDE_STEP + sizes.head / (self.rates.device_gbps * GIGABYTE)
        return Priced(costs.for_tiles(sizes.header.shape.tiles), rest, rest, "derived from these rates")

    def faster(self, side: str, factor: float, sizes: Sizes, context: int) -> Priced:
        name = f"{side}_gbps"
        rates = replace(self.rates, **{name: getattr(self.rates, name) * factor})
        return replace(self, rates=rates).priced(sizes, context)


@dataclass
class FromFile(Hardware):
    """A machine given by a file of costs, which are of one format."""

    words: str
    costs: Costs
    memory: Machine
    only: FormatName | None = None
    unknown: list[str] = field(default_factory=list)
    device: DeviceName = "cuda"

    def priced(self, sizes: Sizes, context: int) -> Priced:
        return Priced(self.costs.for_tiles(sizes.header.shape.tiles), 0.0, 0.0, self.words)


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
    base = None if known is None else MACHINES[known]
    rates, guessed = _rates(given, base)
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
    return Numbered(words, rates, _memory(written, gpu_gb), unknown)


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
    unknown = [f"the costs are taken to be those of {only}, for which alone they hold"]
    unknown.append("embedding, head, sampling, planning and messages are not in the file, and not in this")
    return FromFile(
        f"costs: {path}, GPU of {gpu_gb:g} GB", Costs.load(path), _memory(written, gpu_gb), only, unknown
    )


def _memory(written: Mapping[str, Any], gpu_gb: float) -> Machine:
    host = int(written["host_gb"] * GIGABYTE) if "host_gb" in written else ENOUGH
    return Machine(memory=host, shm=host, gpu=int(GPU_FREE * gpu_gb * GIGABYTE))
