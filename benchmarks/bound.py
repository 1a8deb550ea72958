"""Where `tandem` and `cache` are behind Belady, and by what: one table, by replay of drawn routing.

    python -m benchmarks.bound [--layers 8]

On a 4090 at PCIe 4.0, 4.25 bits a weight, one sequence; 8 layers of each model, with the locality that was
published for it. The bounds know what comes: `on-demand+belady` has the most hits of any cache and fetches
what it lacks, `fiddler+belady` computes that on the host where it is cheaper, and copies experts behind it.
"""

from __future__ import annotations

import argparse

from benchmarks.papers import Job, drawn, replayed
from benchmarks.tandem import BITS, MODELS
from pipeline.policies.costs import MACHINES, derived
from pipeline.policies.view import ModelShape
from pipeline.traces.synthetic import PROFILES

PROFILE = {"mixtral": "mixtral-8x7b", "qwen3": "qwen3-30b-a3b"}
CACHES = {"mixtral": (0.25, 0.5), "qwen3": (0.12, 0.25)}
BOUNDS = ("on-demand+belady", "fiddler+belady")
OTHERS = (
    *("on-demand", "on-demand+least-stale", "fiddler", "bandwidth-split", "hybrimoe"),
    *("mixtral-offloading", "mixtral-offloading+edge-moe", "fiddler+lightning"),
)
POLICIES = ("tandem", "cache", "cache:prediction=next-gate", *OTHERS, *BOUNDS)
COLUMNS = ("tok/s", "of the faster bound", "hits", "experts moved a layer", "device waits for the link")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    texts, jobs = {}, []
    for name, profile in PROFILE.items():
        of = MODELS[name]
        shape = ModelShape(given.layers, of.experts, of.tiles, of.top_k)
        texts[name] = drawn(shape, PROFILES[profile], 0, given.tokens)
        expert = of.weights * BITS / 8
        costs = derived(MACHINES["4090-pcie4"], expert, of.weights, 2 * of.other, of.other)
        jobs += [Job(name, policy, costs, cache) for cache in CACHES[name] for policy in POLICIES]
    found = replayed(texts, jobs)
    print(f"| | | {' | '.join(COLUMNS)} |\n" + "|---" * 7 + "|")
    for row in found.rows:
        bound = max(found.get("tok_s", text=row["text"], cache=row["cache"], policy=p)[0] for p in BOUNDS)
        print(
            f"| {row['text']}, {row['cache']:.0%} | {row['policy']} | {row['tok_s']:.3g} |"
            f" {row['tok_s'] / bound:.2f} | {row['hits']:.0%} | {row['moved']:.2f} | {row['waits']:.0%} |"
        )


if __name__ == "__main__":
    main()
