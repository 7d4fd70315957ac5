# Two commands matter on a fresh machine with Python 3.11+: `make quickstart` and `make test`.
# Each makes .venv and installs exactly what constraints.txt pins; `make install` does that alone.

PYTHON ?= python3
BIN = .venv/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: install quickstart test test-all lint golden docs clean

install: .venv/runtime
	@echo "installed; now: source .venv/bin/activate"

quickstart: .venv/runtime
	$(BIN)/dpsweep launch sweeps/quickstart.yaml --unique

# Two processes, of one thread each: most tests are small, and those of whole sweeps mostly wait.
# Bytecode is written even where the environment forbids it: a hundred processes import the package.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 2 --dist worksteal -p no:cacheprovider

test: .venv/dev
	$(PYTEST) -m "not slow and not gpu"

test-all: .venv/dev
	$(PYTEST) -m "not gpu"

lint: .venv/dev
	$(BIN)/ruff check benchmarks dpsweep tests
	$(BIN)/ruff format --check benchmarks dpsweep tests
	$(BIN)/mypy
	$(BIN)/mypy benchmarks
	$(BIN)/lint-imports

docs: .venv/dev
	PYTHONPATH=$(CURDIR) NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

golden: .venv/dev
	$(BIN)/python tests/golden/test_curves.py

clean:
	rm -rf .venv build site *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

.venv/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11. Name another with: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv .venv
	touch $@

.venv/runtime: .venv/python pyproject.toml constraints.txt
	@echo "installing (torch alone is some GB: minutes on a first run) ..."
	$(PIP) -e .
	touch $@

.venv/dev: .venv/runtime
	$(PIP) -e '.[dev]'
	touch $@
