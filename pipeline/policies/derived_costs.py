"""Costs of a machine that is not here, from its rates: bytes a second of host memory, link and device
memory, operations a second of both sides, and latencies.

A roofline: an expert takes as long as its bytes are read or its arithmetic is done, whichever is longer. The
rates are those that programs reach, not those of a data sheet. What a roofline leaves out (caches, small
batches that use a few cores, clocks that fall) is why measured costs come first where there are any.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from pipeline.errors import PolicyError
from pipeline.policies.costs import Costs

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)  # of the grid
LATENCIES = ("round_trip", "layer", "launch", "fetch")
OPERATIONS = 2  # a multiplication and an addition, for each weight and row


@dataclass(frozen=True)
class Rates:
    """What a machine reaches. Raises PolicyError where a number cannot be a rate or a latency."""

    host_gbps: float  # of the host's memory, which the workers and the link read together
    link_gbps: float
    device_gbps: float  # of the device's memory
    host_tflops: float
    device_tflops: float
    round_trip: float = 6e-5  # seconds of an empty Work, there and back
    layer: float = 1e-4  # seconds of starting the kernels of a layer, without its routed experts
    launch: float = 2e-5  # of starting those of its routed experts
    fetch: float = 1e-5  # of ordering the missing tiles of an expert

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            latency = field.name in LATENCIES
            if not (math.isfinite(value) and (value >= 0 if latency else value > 0)):
                wanted = "seconds, not negative" if latency else "a rate above 0"
                raise PolicyError(f"rates: '{field.name}' is {value}; it must be {wanted}")

    @property
    def workers_gbps(self) -> float:
        """What the workers read while the link runs: the two share one memory. They have half of it at
        least, as a link that could take more does not come before them."""
        return max(self.host_gbps - self.link_gbps, self.host_gbps / 2)


# What programs reach, by our own estimate: about 80 % of the memory's and the link's data sheet, half of
# the arithmetic. The A100 stands beside 8 channels of DDR4-3200, the 4090 beside 2 of DDR5-5600, the H200
# beside 12 of DDR5-4800.
MACHINES = {
    "a100-pcie4": Rates(160.0, 25.0, 1500.0, 1.5, 150.0),
    "4090-pcie4": Rates(70.0, 25.0, 850.0, 1.2, 80.0),
    "h200-pcie5": Rates(360.0, 52.0, 3800.0, 4.0, 450.0),
}


def derived(
    rates: Rates, expert_bytes: float, expert_weights: float, other_bytes: float = 0, other_weights: float = 0
) -> Costs:
    """Costs of whole experts (`per` expert) of so many bytes as they are stored, and of so many weights. A
    layer has `other_bytes` and `other_weights` beside its routed experts, all on the device."""

    def seconds(gbps: float, tflops: float, size: float, weights: float) -> tuple[float, ...]:
        return tuple(max(size / gbps / 1e9, OPERATIONS * weights * rows / tflops / 1e12) for rows in ROWS)

    other = seconds(rates.device_gbps, rates.device_tflops, other_bytes, other_weights)
    return Costs(
        rows=ROWS,
        host=seconds(rates.workers_gbps, rates.host_tflops, expert_bytes, expert_weights),
        device=seconds(rates.device_gbps, rates.device_tflops, expert_bytes, expert_weights),
        link=expert_bytes / rates.link_gbps / 1e9,
        round_trip=rates.round_trip,
        other=tuple(rates.layer + value for value in other),
        launch=rates.launch,
        fetch=rates.fetch,
        per="expert",
    )
