# Two commands: `make run` chats with the embedded model, `make test` checks everything.
# Both set up .venv by themselves; their messages about it go to stderr, so that stdout holds only answers.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TEST_TOOLS := $(VENV)/.test-tools
PIP := $(BIN)/pip --quiet --disable-pip-version-check install

# torch's CPU build where there is no NVIDIA GPU: the other brings 3 GB of CUDA libraries. `make run TORCH=cuda` or
# TORCH=cpu chooses by hand.
TORCH ?= $(shell if grep -qs 0x10de /sys/bus/pci/devices/*/vendor || test -e /dev/dxg; then echo cuda; else echo cpu; fi)
CPU_BUILDS := https://download.pytorch.org/whl/cpu

# Prints requirements of pyproject.toml: of the extra, or else of the library, that its argument names.
REQUIRED := import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  print(*project["optional-dependencies"].get(sys.argv[1]) \
  or [line for line in project["dependencies"] if line.startswith(sys.argv[1])], sep="\n")

# $(call dotted,COMMAND) runs a long command; every two seconds a dot on stderr shows that it goes on.
dotted = { while sleep 2 && kill -0 $$$$ 2> /dev/null; do printf .; done & } >&2; dots=$$!; \
  $(1); code=$$?; kill $$dots; echo >&2; test $$code = 0

comma := ,

.SILENT:
.PHONY: run test survey test-wheel gpu

run: $(READY)
	exec $(BIN)/python launch.py

# Processes that tests start import our modules by the hundred: they are compiled once, even if the environment
# forbids it. mypy, which uses one core, runs beside the first tests, many of which only one process runs.
test: export PYTHONDONTWRITEBYTECODE =
test: $(TEST_TOOLS)
	echo "ruff ..." && $(BIN)/ruff check .
	echo "mypy and pytest ..."
	$(BIN)/mypy >$(VENV)/mypy.txt 2>&1 & types=$$!; \
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0; tests=$$?; \
	wait $$types; types=$$?; echo "mypy:"; cat $(VENV)/mypy.txt; exit $$((tests ? tests : types))

# Every family of transformers against transformers, where `test` has a sample of them: about five minutes.
survey: $(TEST_TOOLS)
	exec $(BIN)/python -m pytest -q -m survey -n 2 --max-worker-restart 0 tests/parity/test_survey.py

# What `pip install .` installs, in an environment of its own: half a minute, nothing is downloaded or compiled.
test-wheel: $(TEST_TOOLS)
	echo "from a wheel ..." && .ci/wheel $(BIN)/python

# Everything that only a GPU can show, in the folder gpu-report: some minutes, no network.
gpu: $(TEST_TOOLS)
	exec $(BIN)/python -m benchmarks.gpu

$(READY): pyproject.toml setup.py $(wildcard workers/kernels/c/*) $(wildcard shm/*.c pipeline/*/*.c)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "make: Python 3.11 or newer is needed as '$(PYTHON)'; install it, or run make PYTHON=/path/to/python3" >&2; \
	  exit 1; }
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "make: '$(PYTHON)' has no venv module; on Debian and Ubuntu: apt install python3-venv" >&2; \
	  exit 1; }
	command -v $${CC:-cc} >/dev/null || { \
	  echo "make: no C compiler, which the kernels need; on Debian and Ubuntu: apt install gcc" >&2; exit 1; }
	echo "make: installing into $(VENV); the first time takes some minutes ..." >&2
	$(PYTHON) -m venv $(VENV) >&2
	if [ $(TORCH) = cpu ]; then \
	  echo "make: no NVIDIA GPU found: torch's CPU build, about 200 MB (TORCH=cuda takes the other)" >&2; \
	  { $(call dotted,$(PIP) --no-deps --retries 1 --index-url $(CPU_BUILDS) \
	    "$$($(BIN)/python -c '$(REQUIRED)' torch)" >&2); } || \
	  echo "make: torch's CPU build cannot be had from $(CPU_BUILDS); taking the usual build" >&2; \
	fi
	$(call dotted,$(PIP) -e '.[serve$(if $(filter cuda,$(TORCH)),$(comma)cuda)]' >&2)
	touch $@

$(TEST_TOOLS): $(READY)
	echo "make: installing what the tests need ..." >&2
	$(call dotted,$(BIN)/python -c '$(REQUIRED)' dev | $(PIP) -r /dev/stdin >&2)
	{ $(call dotted,$(BIN)/python -c '$(REQUIRED)' clients | timeout 300 $(PIP) -r /dev/stdin >&2); } || \
	echo "make: lm_eval cannot be had; its test will skip" >&2
	{ $(call dotted,$(BIN)/python -c '$(REQUIRED)' nvrtc | timeout 300 $(PIP) -r /dev/stdin >&2); } || \
	echo "make: NVRTC cannot be had; no test will compile CUDA kernels" >&2
	touch $@
