# make demo   set up everything and run the main job on a real MoE model, no GPU needed
# make demo-ray   the same through Ray Serve, in a smaller size
# make gpu-check   build for, check and time the GPU of this machine (needs torch with CUDA)
# make test   set up everything and run all tests that this machine can run
# make coverage   the same under coverage.py; writes results/coverage.json
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
ENGINE := requirements/engine-cpu.lock
TOOLS := requirements/dev.lock
NATIVE := setup.py pyproject.toml $(shell find csrc -type f 2>/dev/null)

# Two processes, a file at a time and in the order of the tree: the long engine files begin early.
# Each process computes on one thread, or the two would wait for each other's.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo demo-ray test lint setup clean gpu-check coverage
.DELETE_ON_ERROR:

setup: $(VENV)/.patched

$(VENV)/.packages: $(ENGINE) $(TOOLS)
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r $(ENGINE) -r $(TOOLS) || { \
	  echo; echo "pip could not install the pinned packages. If it did not find torch ...+cpu, run again with"; \
	  echo "  PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make $(MAKECMDGOALS)"; exit 1; }
	touch $@

$(VENV)/.eldr: $(VENV)/.packages $(NATIVE)
	ELDR_SKIP_EXT=0 $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.patched: $(VENV)/.eldr $(wildcard patches/*)
	$(BIN)/eldr patch apply --if-needed
	$(BIN)/eldr patch verify
	touch $@

demo: setup
	$(BIN)/eldr demo

demo-ray: setup
	$(BIN)/python -m eldr.demo.ray_run $(ARGS)

lint: $(VENV)/.eldr
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: setup lint
	OMP_NUM_THREADS=1 $(BIN)/pytest $(PARALLEL)

# Every test under coverage.py, subprocesses and engines included; the summary is committed.
coverage: setup lint
	$(BIN)/coverage erase
	-OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest $(PARALLEL) --timeout=1500
	$(BIN)/coverage combine
	$(BIN)/coverage json -o build/coverage.json
	$(BIN)/python -m benchmarks.coverage build/coverage.json

# Runs where torch has CUDA, which the pinned environment above does not: name that Python.
GPU_PYTHON ?= python3
gpu-check:
	$(GPU_PYTHON) -m profiling.gpu_check $(ARGS)

clean:
	rm -rf $(VENV) build demo-out
