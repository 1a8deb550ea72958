"""The C libraries, which pyproject.toml cannot describe without a list of every header. Not every compiler
knows the instructions of every variant of the kernels: those but the portable one may be missing."""

from glob import glob

from setuptools import Extension, setup

# As in the C standard, and nothing fused: the same numbers become the same bytes on every processor.
EXACT = ["-O3", "-ffp-contract=off"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni")]
AVX512 += ["-mfma", "-mprefer-vector-width=512"]
AMX = ["-mamx-tile", "-mamx-int8", "-mamx-bf16"]
VARIANTS = {"amx": AMX + AVX512, "avx512": AVX512, "avx2": AVX2, "portable": []}


def library(name: str, source: str, *flags: str, **settings: list[str]) -> Extension:
    return Extension(name, [source], extra_compile_args=[*EXACT, *flags], **settings)


def kernels(variant: str, flags: list[str]) -> Extension:
    folder = "workers/kernels/c"
    depends, link = sorted(glob(f"{folder}/*")), ["-pthread"]
    extension = library(
        f"workers.kernels._{variant}",
        f"{folder}/{variant}.c",
        "-pthread",
        *flags,
        depends=depends,
        extra_link_args=link,
    )
    extension.optional = bool(flags)
    return extension


setup(
    ext_modules=[
        library("shm._quantize", "shm/quantize.c", "-fno-trapping-math", "-fno-math-errno"),
        library("shm._doorbell", "shm/doorbell.c"),
        library("pipeline.experts._divide", "pipeline/experts/divide.c"),
        library("pipeline.cluster._rows", "pipeline/cluster/rows.c", depends=["workers/kernels/c/groups.h"]),
        *(kernels(variant, flags) for variant, flags in VARIANTS.items()),
    ]
)
