"""advise against the engine: predicted and measured tokens a second of presets on emulated machines."""
from __future__ import annotations
import argparse, asyncio, json, statistics, sys, time
from dataclasses import replace
from pathlib import Path
from launch.advise.estimate import Setting, estimate
from launch.advise.hardware import Priced
from launch.advise.routing import recorded
from launch.advise.sizes import sizes_of
from launch.advise.trial import fitted, probed_costs, run_presets
from launch.bench.command import read_other_texts
from launch.command_line.options import parse
from launch.connect.session import connected
from launch.terminal.interrupts import Interrupts
from launch.bench.prompts import make_prompts
from launch.bench.run import warm_up
from pipeline.checkpoint.open import open_model
from pipeline.policies.view import PolicyRequest
from pipeline.assets import model_dir

P, WARM, NEW = 48, 40, 40
async def record(words, path):
    options = parse(["bench", *words, "--record", str(path)])
    async with connected(options, Interrupts()) as client:
        await read_other_texts(client, 0)
        prompts = await make_prompts(client, 2, P, 0)
        await warm_up(client, prompts[1:], WARM); await warm_up(client, prompts[:1], NEW)

async def measured(words, policies):
    options = parse(["bench", *words])
    async with connected(options, Interrupts()) as client:
        await client.set_policy("all-host", {})
        await read_other_texts(client, 0)
        probed = await probed_costs(client)
        runs = await run_presets(client, policies, P, WARM, NEW, 1, 0)
        stats = await client.stats()
        from pipeline.policies.costs import Costs
        return probed, runs, stats["cache"]["capacity_tiles"], Costs.from_json(stats["costs"])

async def main():
    name, words, policies = sys.argv[1], sys.argv[2].split(), [PolicyRequest(n) for n in sys.argv[3].split(",")]
    model = Path(words[words.index("--model") + 1]) if "--model" in words else model_dir()
    path = Path(f"/tmp/adv/{sys.argv[4]}.trace")
    if not path.exists():
        base = [w for w in words]
        for o in ("--link-gbps", "--host-slowdown", "--expert-cache"):
            if o in base: i = base.index(o); del base[i:i+2]
        await record(base, path)
    probed, runs, capacity, after = await measured(words, policies)
    options = parse(["bench", *words])
    config = replace(options.config(), device="cpu", workers=2)
    source = open_model(model)
    sizes = sizes_of(source, config, config.format or "bf16")
    text = recorded(path, sizes.header)
    import pickle; pickle.dump((name, words, probed, runs, capacity, after, path), open(f"/tmp/adv/{name}.pickle", "wb"))
asyncio.run(main())
