# Two commands: `make run` chats with the embedded model, `make test` checks everything.
# Both set up .venv by themselves; their messages about it go to stderr, so that stdout holds only answers, and what
# pip and the compiler say goes to .venv/setup.log.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TEST_TOOLS := $(VENV)/.test-tools
LOG := $(VENV)/setup.log
STEP := .ci/step $(LOG)
PIP := $(BIN)/pip --disable-pip-version-check install

# torch's CPU build where there is no NVIDIA GPU: the other brings 3 GB of CUDA libraries. `make run TORCH=cuda` or
# TORCH=cpu chooses by hand.
TORCH ?= $(shell if grep -qs 0x10de /sys/bus/pci/devices/*/vendor || test -e /dev/dxg; then echo cuda; else echo cpu; fi)
CPU_BUILDS := https://download.pytorch.org/whl/cpu

# $(call required,NAMES) are requirements of pyproject.toml: of an extra, of the library of such a name, or of '' all of
# the project's own.
REQUIRED := import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  own, extras = project["dependencies"], project["optional-dependencies"]; \
  print(*(line for name in sys.argv[1:] \
  for line in extras.get(name) or [line for line in own if line.startswith(name)]))
required = $$($(BIN)/python -c '$(REQUIRED)' $(1))

.SILENT:
.PHONY: run test survey test-wheel gpu

# A Ctrl-C during Python's own start would be a traceback: launch.py unblocks the signal, where this env can block it.
BLOCKED := $(shell env --block-signal=INT true 2>/dev/null && echo env --block-signal=INT)
# Its one line about that is the only one: make would add another about the exit code.
run: $(READY)
	trap 'interrupted=yes' INT; $(BLOCKED) $(BIN)/python launch.py; code=$$?; test "$$interrupted" || exit $$code

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

# Everything that only a GPU can show, as archives in the folder gpu-report: half an hour at most, and no network once the
# tools are there (docs/kernels.md has the way without any).
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
	mkdir -p $(VENV) && : >$(LOG)
	echo "make: setting up $(VENV); the first time takes some minutes" >&2
	$(STEP) "making $(VENV)" $(PYTHON) -m venv $(VENV)
	if [ $(TORCH) = cpu ]; then \
	  echo "make: no NVIDIA GPU found: torch's CPU build, 200 MB (TORCH=cuda: the other)" >&2; \
	  $(STEP) "installing torch" $(PIP) --no-deps --retries 1 --index-url $(CPU_BUILDS) $(call required,torch) || \
	  echo "make: taking torch's usual build instead" >&2; \
	fi
	$(STEP) "installing packages" $(PIP) $(call required,'' serve$(if $(filter cuda,$(TORCH)), cuda))
	$(STEP) "compiling the kernels" $(PIP) --verbose --no-deps -e .
	touch $@

$(TEST_TOOLS): $(READY)
	$(STEP) "installing what the tests need" $(PIP) $(call required,dev)
	$(STEP) "installing lm_eval" timeout --foreground 300 $(PIP) $(call required,clients) || \
	echo "make: lm_eval cannot be had; its test will skip" >&2
	$(STEP) "installing Ray" timeout --foreground 300 $(PIP) $(call required,cluster) || \
	echo "make: Ray cannot be had; the tests with it will skip" >&2
	$(STEP) "installing NVRTC" timeout --foreground 300 $(PIP) $(call required,nvrtc) || \
	echo "make: NVRTC cannot be had; no test will compile CUDA kernels" >&2
	touch $@
