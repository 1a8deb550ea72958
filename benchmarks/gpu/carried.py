"""Our packages for a machine without a network that has Python, pip and torch with what torch brings.

    python -m benchmarks.gpu.carried [FOLDER]                where there is a network: fills the folder
    python3 -m benchmarks.gpu.carried --install [FOLDER]     there: makes `gpu-venv` from it

The folder is by default `gpu-wheels`, which git ignores; it gets one file of about 22 MB, the wheels for
Python 3.12 on x86-64. This module needs only the standard library.
"""

from __future__ import annotations

import argparse
import io
import re
import site
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
WHEELS, PLACE = Path("gpu-wheels"), ROOT / "gpu-venv"
FILE = "wheels.tar.xz"
PYTHON = "3.12"
GLIBC = range(5, 29)  # 2.28 at most
TOOLS = ("pytest", "hypothesis")  # of the extra `dev`
BROUGHT = {"torch", "numpy", "setuptools", "cuda-bindings"}  # by torch's CUDA build; not carried


def required() -> list[str]:
    """Returns what pyproject.toml asks for: to build, to run on CUDA, and what the GPU's tests import."""
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = described["project"]
    extras = project["optional-dependencies"]
    tests = [line for line in extras["dev"] if line.startswith(TOOLS)]
    return [*described["build-system"]["requires"], *project["dependencies"], *extras["cuda"], *tests]


def name_of(requirement: str) -> str:
    """Returns the name of a requirement or of a wheel's file, as an index has it."""
    return re.split(r"[^\w.-]", requirement)[0].partition("-" if requirement.endswith(".whl") else " ")[0]


def fill(folder: Path) -> Path:
    """Download the wheels and pack them. Returns the file. Raises CalledProcessError as pip."""
    names = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC]
    names += ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"]
    platforms = [f"--platform={name}" for name in names]
    wanted = [line for line in required() if name_of(line) not in BROUGHT]
    with TemporaryDirectory() as downloads:
        options = ["--quiet", "--only-binary=:all:", "--implementation=cp", f"--python-version={PYTHON}"]
        pip = [sys.executable, "-m", "pip", "download", *options, *platforms, "--dest", downloads]
        subprocess.run([*pip, *wanted], check=True)
        return pack(Path(downloads), folder)


def pack(wheels: Path, folder: Path) -> Path:
    """Returns a file in the folder with these wheels, without those that torch brings. Wheels are compressed
    each by itself: without that, all together become half as large."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{FILE}.part"
    with tarfile.open(part, "w:xz") as packed:
        for wheel in sorted(wheels.glob("*.whl")):
            if name_of(wheel.name) not in BROUGHT:
                data = stored(wheel)
                entry = tarfile.TarInfo(wheel.name)
                entry.size = len(data)
                packed.addfile(entry, io.BytesIO(data))
    return part.replace(folder / FILE)


def stored(wheel: Path) -> bytes:
    """Returns the same wheel without compression."""
    data = io.BytesIO()
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(data, "w") as plain:
        for entry in source.infolist():
            plain.writestr(zipfile.ZipInfo(entry.filename, entry.date_time), source.read(entry))
    return data.getvalue()


def install(folder: Path, place: Path) -> None:
    """Make an environment from the wheels and from the packages of this Python, which may itself be an
    environment's: one made with its system's packages would not see those. Raises CalledProcessError as pip,
    which names what is missing."""
    venv.EnvBuilder(system_site_packages=True, clear=True, symlinks=True).create(place)
    packages = next(place.glob("lib/python*/site-packages"))
    (packages / "beside.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(place / "bin/python")]
    with TemporaryDirectory() as wheels:
        with tarfile.open(folder / FILE) as packed:
            packed.extractall(wheels, filter="data")
        options = ["--quiet", "--no-index", "--no-compile", "--find-links", wheels]
        subprocess.run([*pip, "install", *options, *required()], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=WHEELS)
    parser.add_argument("--install", action="store_true", help=f"make {PLACE.name} from the folder")
    arguments = parser.parse_args()
    try:
        if arguments.install:
            install(arguments.folder, PLACE)
        else:
            file = fill(arguments.folder)
            print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")
    except FileNotFoundError as e:
        print(f"{e.filename} is missing; `python -m benchmarks.gpu.carried` makes it", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as e:
        return e.returncode
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
