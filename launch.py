"""Start Tandem from a checkout: `python launch.py`, or `python launch.py generate --prompt ...`.

Where the running Python is too old or lacks a required package, the Python of `.venv`, which `make run`
sets up, takes over. So this file itself runs with an old Python and without any package.
"""

import os
import sys

from launch.start import catch_interrupts, hold_interrupts, main

ROOT = os.path.dirname(os.path.realpath(__file__))
VENV = os.path.join(ROOT, ".venv")


def _can_run_here() -> bool:
    """Returns whether the running Python is new enough and has every required package, in whichever
    version."""
    if sys.version_info < (3, 11):  # noqa: UP036 - an old Python gets as far as this
        return False
    import re
    import tomllib
    from importlib.metadata import PackageNotFoundError, version

    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        required = tomllib.load(file)["project"]["dependencies"]
    try:
        return all(version(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in required)
    except PackageNotFoundError:
        return False


def _main() -> int:
    catch_interrupts()
    if os.path.realpath(sys.prefix) != os.path.realpath(VENV) and not _can_run_here():
        python = os.path.join(VENV, "bin", "python")
        if not os.path.exists(python):
            print(f"launch.py: packages are missing; first: cd {ROOT} && make run", file=sys.stderr)
            return 1
        options = sys.orig_argv[1:] if hasattr(sys, "orig_argv") else sys.argv  # with Python's own, as -u
        hold_interrupts()
        os.execv(python, [python, *options])
    return main()


if __name__ == "__main__":
    raise SystemExit(_main())
