"""A forked process sees what an executed one sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from fork_server import ForkedPython

SHOW = """
import gc, json, os, signal, sys, threading
numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGHUP)
streams = (sys.stdin, sys.stdout, sys.stderr)
umask = os.umask(0)
print(json.dumps({
    "argv": sys.argv,
    "folder": os.getcwd(),
    "umask": umask,
    "cores": sorted(os.sched_getaffinity(0)),
    "environment": dict(os.environ),
    "parent": os.getppid(),
    "signals": [str(signal.getsignal(number)) for number in numbers],
    "threads": [thread.name for thread in threading.enumerate()],
    "streams": [(s.encoding, s.errors, s.line_buffering, s.name, s.fileno()) for s in streams],
    "input": sys.stdin.read(),
    "collects": gc.isenabled(),
}))
print("an error", file=sys.stderr)
sys.exit(3)
"""


def ended(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any], str]:
    with process:
        out, err = process.communicate("ä\n", 60)
    return process.returncode, json.loads(out), err


def test_a_forked_process_sees_what_an_executed_one_sees(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    settings: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "cwd": tmp_path}
    settings["env"] = os.environ | {"ADDED": "ö"}
    before = os.umask(0o027)
    try:
        code, forked, err = ended(ForkedPython("-c", SHOW, "an argument", **settings))
        executed = ended(subprocess.Popen([sys.executable, "-c", SHOW, "an argument"], text=True, **settings))
    finally:
        os.umask(before)
    assert (code, forked, err) == executed
    assert (code, err) == (3, "an error\n")
    assert (forked["umask"], forked["input"], forked["parent"]) == (0o027, "ä\n", os.getpid())


def test_a_forked_process_ends_as_an_executed_one() -> None:
    for code in (
        "import sys; sys.exit('a reason')",
        "raise ValueError",
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import signal as s, threading as t; "
        "t.Thread(target=s.pthread_kill, args=(t.get_ident(), s.SIGKILL)).start()",
        "import os; print(end='lost'); os.close(1)",
        "import atexit, threading; atexit.register(print, 1); threading.Timer(0.1, print, (2,)).start()",
    ):
        pipe = subprocess.PIPE
        ends = []
        for process in (
            ForkedPython("-c", code, stdout=pipe, stderr=pipe),
            subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True),
        ):
            with process:
                out, err = process.communicate(timeout=60)
            ends.append((process.returncode, out, err.splitlines()[-1:]))
        assert ends[0] == ends[1], code
