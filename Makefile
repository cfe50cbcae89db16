# Every target sets up what it needs on a fresh machine. `make train` and `make test` are the two to know.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h') setup.py pyproject.toml
CPP := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu')

.PHONY: setup dev build train test lint bench audit gpu gpu-test gpu-bench wheel clean

setup: build

$(STAMP)-run: requirements/torch.txt requirements/run.txt requirements/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	mkdir -p $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/torch.txt -c requirements/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/run.txt -c requirements/constraints.txt
	touch $@

$(STAMP)-dev: $(STAMP)-run requirements/dev.txt requirements/no-deps.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt -c requirements/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/no-deps.txt
	touch $@

$(STAMP)-build: $(STAMP)-run $(SOURCES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $@

build: $(STAMP)-build
	@$(BIN)/dpkernels info

dev: $(STAMP)-dev $(STAMP)-build

train: $(STAMP)-build
	$(BIN)/dpkernels train --out runs/first-$$(date +%Y%m%d-%H%M%S)

# A process for each core, file by file: tests of one share what is slow to make. pytest-benchmark is for bench/.
test: dev
	$(BIN)/python -m pytest -p no:benchmark -n auto --dist loadfile --no-loadscope-reorder --durations 25

lint: $(STAMP)-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	@mkdir -p build
	@echo "C++ with warnings as errors"; DPKERNELS_WERROR=1 DPKERNELS_REQUIRE_NATIVE=1 $(BIN)/python setup.py build_ext \
	  --build-temp build/lint --build-lib build/lint > build/lint.log 2>&1 || (cat build/lint.log; false)

bench: dev
	$(BIN)/dpkernels bench --full
	$(BIN)/python -m bench

audit: dev
	$(BIN)/python -m bench soundness
	$(BIN)/python -m bench audit

# For whoever has a GPU, with a torch that knows it: PYTHON and BIN may point at another environment.
gpu: dev
	$(BIN)/python -m dpkernels.build_cuda

# AMD, and NVIDIA without nvcc, do without what `gpu` builds.
gpu-test: dev
	-$(BIN)/python -m dpkernels.build_cuda
	$(BIN)/python -m pytest tests/gpu/check_gpu.py

gpu-bench: dev
	-$(BIN)/python -m dpkernels.build_cuda
	$(BIN)/python -m bench gpu

wheel: dev
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir dist .
	@ls dist/*.whl

clean:
	rm -rf $(VENV) build dist *.egg-info dpkernels/*.so
