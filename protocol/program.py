"""How messages write this installation's commands; `pip install` copies no launch.py."""

from __future__ import annotations

from pathlib import Path

_CHECKOUT = (Path(__file__).resolve().parents[1] / "launch.py").is_file()
PROGRAM = "launch.py" if _CHECKOUT else "tandem"  # where a command is only named
COMMAND = "python launch.py" if _CHECKOUT else "tandem"  # where it is to be typed
REPAIR = "in Tandem's folder run: make -B run" if _CHECKOUT else "install Tandem again with pip"
