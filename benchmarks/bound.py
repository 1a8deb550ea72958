"""Where `tandem` and `cache` are behind Belady, and by what: one table, by replay of drawn routing.

    python -m benchmarks.bound [--layers 8] [--batch 4]

On a 4090 at PCIe 4.0, 4.25 bits a weight, one sequence or several; 8 layers of each model, with the locality
that was published for it, means of some draws. The bounds know what comes: `on-demand+belady` has the most
hits of any cache and fetches what it lacks, `fiddler+belady` computes that on the host where it is cheaper,
and copies experts behind it.
"""

from __future__ import annotations

import argparse
from itertools import product
from statistics import mean

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
COLUMNS = ("tok/s", "of the faster bound", "hits", "of tiles", "experts moved a layer", "waits for the link")
FIGURES = ("tok_s", "hits", "tile hits", "moved", "waits")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--draws", type=int, default=3)
    given = parser.parse_args()
    texts, jobs = {}, []
    for (name, profile), seed in product(PROFILE.items(), range(given.draws)):
        of, text = MODELS[name], f"{name} {seed}"
        shape = ModelShape(given.layers, of.experts, of.tiles, of.top_k)
        texts[text] = drawn(shape, PROFILES[profile], 0, given.tokens, given.batch, seed)
        expert = of.weights * BITS / 8
        costs = derived(MACHINES["4090-pcie4"], expert, of.weights, 2 * of.other, of.other)
        labels = (("model", name),)
        jobs += [Job(text, policy, costs, cache, labels) for cache in CACHES[name] for policy in POLICIES]
    found = replayed(texts, jobs)

    def figure(name: str, model: str, cache: float, policy: str) -> float:
        return mean(found.get(name, model=model, cache=cache, policy=policy))

    print(f"| | | {' | '.join(COLUMNS)} |\n" + "|---" * 8 + "|")
    for model in PROFILE:
        for cache, policy in product(CACHES[model], POLICIES):
            setting = model, cache
            bound = max(figure("tok_s", *setting, name) for name in BOUNDS)
            speed, hits, tiles, moved, waits = (figure(name, *setting, policy) for name in FIGURES)
            print(
                f"| {model}, {cache:.0%} | {policy} | {speed:.3g} | {speed / bound:.2f} | {hits:.0%} |"
                f" {tiles:.0%} | {moved:.2f} | {waits:.0%} |"
            )


if __name__ == "__main__":
    main()
