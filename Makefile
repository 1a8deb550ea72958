# Two commands: `make run` chats with the embedded model, `make test` checks everything.
# Both set up .venv by themselves; their messages about it go to stderr, so that stdout holds only answers.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.SILENT:
.PHONY: run test test-without-compiler

run: $(READY)
	exec $(BIN)/python launch.py

# Processes that tests start import our modules by the hundred: they are compiled once, even if the environment
# forbids it.
test: export PYTHONDONTWRITEBYTECODE =
test: $(READY)
	echo "ruff ..." && $(BIN)/ruff check .
	echo "mypy ..." && $(BIN)/mypy
	echo "pytest ..." && $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# The kernels' tests where nothing was compiled: installation must not need a compiler.
test-without-compiler: $(READY)
	echo "without a compiler ..." && .ci/without-compiler $(BIN)/python

$(READY): pyproject.toml $(wildcard workers/kernels/c/*) $(wildcard shm/*.c)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "make: Python 3.11 or newer is needed as '$(PYTHON)'; install it, or run make PYTHON=/path/to/python3" >&2; \
	  exit 1; }
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "make: '$(PYTHON)' has no venv module; on Debian and Ubuntu: apt install python3-venv" >&2; \
	  exit 1; }
	echo "make: installing into $(VENV); the first time takes some minutes ..." >&2
	$(PYTHON) -m venv $(VENV) >&2
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' >&2
	touch $@
