# Every target works on a fresh clone: the virtual environment is made on first use and pinned by constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Bytecode is kept, also where the shell forbids it: the tests start hundreds of processes, and each would compile
# askew, and each of pytest's rewrite all tests, again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test test-all lint style bench docs ledger wheel-demo clean

setup: $(STAMP)

# Nothing is compiled ahead: Python compiles a file when it is first used, and most of these never are.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt \
	  --editable '.[dev,docs,flower]'
	@touch $(STAMP)

demo: setup
	$(BIN)/askew demo --out demo

# what one waits for; types are checked beside the tests, since alone they take a core for most of a minute
test: style
	$(BIN)/mypy & types=$$!; $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"; tests=$$?; \
	  wait $$types && exit $$tests

# all tests: `test`, then those that are marked slow
test-all: test
	$(BIN)/python -m pytest -n 3 --dist worksteal -m slow

lint: style
	$(BIN)/mypy

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: setup
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/scale.py

docs: setup
	$(BIN)/mkdocs build --strict --quiet --site-dir site

# the pages and pictures follow from papers/ and results/; a test compares them, and README.md has the findings
ledger: setup
	$(BIN)/askew ledger --out docs/reproduction.md
	$(BIN)/python docs/generate.py

# the wheel alone, in an environment that has nothing else
wheel-demo:
	rm -rf build/wheel build/wheel-venv build/wheel-demo
	$(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/pip wheel --quiet --no-deps --wheel-dir build/wheel .
	build/wheel-venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt build/wheel/*.whl
	cd build && wheel-venv/bin/askew demo --out wheel-demo

clean:
	rm -rf $(VENV) site demo runs build *.egg-info src/*.egg-info
