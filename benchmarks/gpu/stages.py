"""The stages of the check on a GPU: what each runs, for how long at most, and whether it needs a GPU."""

from __future__ import annotations

from dataclasses import dataclass

PYTHON = "PYTHON"  # in a command: the Python that has our packages
FIGURES = "FIGURES"  # in a command: the stage's JSON file


@dataclass(frozen=True)
class Stage:
    command: str
    name: str
    words: tuple[str, ...]
    limit: float  # seconds
    gpu: bool = True
    table: bool = False  # its output is one


def module(name: str, *options: str) -> tuple[str, ...]:
    return (PYTHON, "-m", name, *options)


def tests(*words: str) -> tuple[str, ...]:
    return module("pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *words)


def launch(*words: str) -> tuple[str, ...]:
    return (PYTHON, "launch.py", *words)


def bench(shape: str) -> tuple[str, ...]:
    model = f"--model shape:{shape} --device cuda --format int4 --backbone-dtype int4"
    return launch("bench", *model.split(), *ALL.split(), *LENGTHS.split())


ALL = "--policy all-host,on-demand,layerwise,fiddler,tandem,cache --sweep cache=0.25,0.5,1"
LENGTHS = "--prompt-len 64 --gen-len 32 --rounds 2 --ppl-tokens 0"
# A build that has not made the kernels' libraries fails.
BUILD = '"$0" setup.py build_ext --inplace && "$0" -c "$1"'
LOADED = "from workers.kernels.native import best; print('kernels:', best().variant)"
LINK = "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current"
CARD = f"name,driver_version,{LINK},memory.total,memory.free"
HOST = "lscpu; free -b; df -B1 /dev/shm /tmp; ulimit -a; uname -a"
# One format, one shape.
SMALLEST = tests("tests/gpu/test_cuda_tiles.py", "-k", "layers_have and 1-1-int4 and not int4-")
NATIVE = ("tests/workers/test_native_contract.py", "tests/workers/test_native_kernels.py")
STEPS = "tests/gpu/test_cuda_steps.py"
WHOLE = tests(STEPS, "tests/gpu/test_cuda_quantized.py", "tests/gpu/test_channels_on_gpu.py")
CALIBRATE = "calibrate --device cuda --text pipeline/assets/heldout/python.txt --calibrate-tokens 1024"
CHAOS = "stress --device cuda --policy on-demand --expert-cache 0.25 --chaos kill,stop"

REGISTERS = module("benchmarks.gpu.registers", "--format", "int4")
PRIMITIVES = {"copies": 25, "latencies": 25, "host": 20, "partials": 20, "locking": 60}

# Every command begins with these: nothing is measured without them.
ENVIRONMENT = Stage("", "environment", module("benchmarks.gpu.carried", "--install"), 200, gpu=False)
COMPILED = Stage("", "build", ("sh", "-c", BUILD, PYTHON, LOADED), 300, gpu=False)

# Limits are for 16 cores and a disk cache without compiled kernels. Those of a command, with 45 s for the
# environment and 90 s for the build, are together its limit at most, so that every stage is reached there; on
# a slower machine these two take more, from the time of the last stages. What matters most comes first.
STAGES = (
    Stage("facts", "card", ("nvidia-smi", f"--query-gpu={CARD}", "--format=csv"), 5, table=True),
    Stage("facts", "host-bits", tests(*NATIVE), 50, gpu=False),
    Stage("facts", "kernels-bits", tests("tests/gpu/test_cuda_tiles.py"), 90),
    Stage("facts", "device-tests", tests("tests/gpu/test_cuda.py"), 75),
    Stage("facts", "parity", tests("tests/gpu/test_cuda_parity.py"), 80),
    Stage("facts", "quantized", WHOLE, 80),
    Stage("facts", "computer", ("sh", "-c", HOST), 5, gpu=False),
    Stage("facts", "machine", ("nvidia-smi", "-q"), 10),
    Stage("facts", "links", ("nvidia-smi", "topo", "-m"), 5),
    Stage(
        "facts", "compiler", module("benchmarks.gpu.registers", "--format", "int4"), 35, gpu=False, table=True
    ),
    Stage("primitives", "kernels", module("benchmarks.gpu.kernels", "--out", FIGURES), 110, table=True),
    *(
        Stage(
            "primitives", name, module("benchmarks.gpu.primitives", name, "--out", FIGURES), limit, table=True
        )
        for name, limit in PRIMITIVES.items()
    ),
    Stage("primitives", "attention", module("benchmarks.gpu.attention", "--out", FIGURES), 40, table=True),
    Stage("primitives", "doctor", launch("doctor"), 50),
    Stage("primitives", "sanitizer", ("compute-sanitizer", "--error-exitcode", "9", *SMALLEST), 70),
    Stage("engine", "mixtral", bench("mixtral-8x7b/8"), 110, table=True),
    Stage("engine", "qwen3", bench("qwen3-30b-a3b/12"), 90, table=True),
    Stage("engine", "graphs", module("benchmarks.gpu.graphs", "--out", FIGURES), 80, table=True),
    Stage("engine", "killed", launch(*CHAOS.split()), 50),
    Stage("engine", "memory-back", ("nvidia-smi", "--query-gpu=memory.used", "--format=csv"), 5, table=True),
    Stage("engine", "calibrate", launch(*CALIBRATE.split()), 45),
)
