"""The commands of `benchmarks/evidence.py`, their costs, and the rows that are read from their answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.assets import heldout
from pipeline.calibration.cost_cache import measured_here
from pipeline.calibration.file import NAME, read
from pipeline.config import EngineConfig
from pipeline.policies.calibration import Calibration, at_limits
from pipeline.policies.costs import Costs

Row = dict[str, Any]

EXPERT = 99e6 / 1e9  # GB of Mixtral's experts with 4.5 bits a weight
PER_ROW = 2 * 176.2e6  # operations of one row
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 4096]


def _costs(
    link: float, host: tuple[float, float], device: tuple[float, float], other: float, gb: float = EXPERT
) -> Row:
    """Costs of an expert of `gb`. `link`: GB/s; `host`, `device`: GB/s and operations a second; `other`:
    seconds."""
    sides = {"host": host, "device": device}
    found = {k: [max(gb / gbs, PER_ROW * r / ops) for r in ROWS] for k, (gbs, ops) in sides.items()}
    return {"rows": ROWS, **found, "link": gb / link, "round_trip": 2e-5} | {
        "other": [max(other, other * r / 64) for r in ROWS],
        "per": "expert",
    }


# Not published, so derived (docs/evidence.md): of a PCIe 4.0 x16 link 25 GB/s; of the memory of the host, an
# EPYC 7532, half for 16 of its 64 cores; of a GPU's memory 70 %; half of a data sheet's operations.
COSTS = {
    "dali": _costs(25, (100, 0.61e12), (655, 35e12), 0.13e-3),  # RTX 3090
}


def rtx_4090(link: float, layer: float, bits: float = 4.5) -> Costs:
    """Returns the costs of AdapMoE's GPU, whose host computes nothing, with so many GB/s of the link,
    milliseconds of a layer beside its experts, and bits of each of their weights."""
    gb = EXPERT * bits / 4.5
    return Costs.from_json(_costs(link, (100, 0.61e12), (706, 80e12), layer / 1e3, gb))


TRACES = {1: (256, 256), 4: (32, 64), 16: (32, 64), 64: (32, 128)}  # batch: tokens of prompt and answer
# ms of DAOP's table I: an expert on the link and on the host, and a block, a layer on the device
TABLE_1 = (39.87, 3.583, 1.24)


class Commands:
    """Runs launch.py and keeps each answer in a file."""

    def __init__(self, folder: Path, prefix: Sequence[str]) -> None:
        self.folder, self.prefix = folder, prefix
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        (folder / "cache").mkdir(parents=True, exist_ok=True)

    def file(self, name: str) -> Path:
        return self.folder / name

    def run(self, name: str, *words: str) -> Any:
        """The JSON answer of a command, of an earlier run where there is one."""
        path = self.file(f"{name}.answer")
        if not path.exists():
            print("python launch.py", *words, "--json", file=sys.stderr, flush=True)
            command = [*self.prefix, sys.executable, "launch.py", *words, "--json"]
            answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
            path.write_text(answer)
        return json.loads(path.read_text())

    def calibration(self) -> Calibration:
        [path] = self.file("cache").glob(f"tandem/*/{NAME}")
        return read(path)[0]

    def traces(self) -> None:
        """Calibrates and records the embedded model. Text between the prompts of `bench` calibrates: they
        begin every 20,000 bytes."""
        text = self.file("calibration.txt")
        text.write_bytes(b"".join(_piece(path.read_bytes()) for path in heldout().values()))
        self.run("calibrate", "calibrate", "--text", str(text))
        for batch, (prompt, new) in TRACES.items():
            words = ("--prompt-len", str(prompt), "--gen-len", str(new), "--rounds", "1")
            to = ("--sweep", f"batch={batch}", "--record", str(self.trace(batch)))
            self.run(f"record-{batch}", "bench", "--policy", "all-host", *words, *to)

    def trace(self, batch: int) -> Path:
        """The trace of so many requests at once."""
        return self.file(f"batch-{batch}.trace")

    @staticmethod
    def costs(name: str) -> Costs:
        """The costs of this name in COSTS."""
        return Costs.from_json(COSTS[name])

    def measure(self, name: str, policies: str, *words: str) -> list[Row]:
        """Returns a row for each policy of a run of engines."""
        answer = self.run(name, "bench", "--policy", policies, *words)
        points = answer.get("points", [{"settings": {}, **answer}])
        rows = []
        for point in points:
            for policy in point["policies"]:
                speed = policy["decode_tok_s"]
                row = _row(point["settings"], policy, speed["median"])
                rows.append(row | {"least": speed["min"], "most": speed["max"]})
        return rows


def _row(settings: Row, policy: Row, speed: float) -> Row:
    decode = policy["decode"]
    row: Row = {**settings, "policy": label(policy), "tok_s": speed, "hits": decode["hit_rate"]}
    return row | {"wanted": decode["prefetches"]["wanted"], "issued": decode["prefetches"]["share"]}


def _piece(text: bytes) -> bytes:
    return text[text.find(b"\n", 3_000) + 1 : text.find(b"\n", 13_000) + 1]


def quarter(calibration: Calibration) -> float:
    """T of AdapMoE's gate at which 25 % of the (token, layer) pairs use a single expert."""
    sensitivity = np.asarray(calibration.sensitivity, np.float64)
    tried = np.geomspace(1e-7, 1, 400)
    limits = [np.sqrt(one / sensitivity).tolist() for one in tried.tolist()]
    single = [at_limits(calibration.kept, one)[:, 1].mean() for one in limits]
    return float(tried[np.argmin(np.abs(np.subtract(single, 0.25)))])


def label(policy: Row) -> str:
    return " ".join([policy["name"], *(f"{name}={value}" for name, value in policy["options"].items())])


def paces(c: Commands, link: float, host: float, block: float, rows: int = 1) -> list[str]:
    """Options of an engine whose link and host take so long for an expert, in the unit in which a layer of
    resident experts takes `block`."""
    probe = ("--workers", "1", "--rounds", "5", "--ppl-tokens", "0", "--prompt-len", "16", "--gen-len", "48")
    resident = c.run("resident", "bench", "--policy", "layerwise", "--expert-cache", "1", *probe)
    layer = 1 / resident["policies"][0]["decode_tok_s"]["max"] / 8  # s; of the run that least disturbed
    slow = ("--host-slowdown", "60", "--link-gbps", "0.05")
    c.run("slowed", "bench", "--policy", "fiddler", *slow, *probe)
    emulation = EngineConfig(link_gbps=0.05, host_slowdown=60.0).emulation
    record = next(r for _, r in measured_here(c.file("cache/tandem")) if r.setting.emulation == emulation)
    slowdown = 60 * host / block * layer / (record.costs.host_at[rows] * record.tiles)
    gbps = record.tiles * record.tile_bytes / (link / block * layer) / 1e9
    words = ["--workers", "1", "--ppl-tokens", "0"]
    return [*words, "--host-slowdown", f"{slowdown:.3g}", "--link-gbps", f"{gbps:.3g}"]
