# Every target works on a fresh clone: the virtual environment is made on first use and pinned by constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test lint style bench docs ledger clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,docs,flower]'
	@touch $(STAMP)

demo: setup
	$(BIN)/askew demo --out demo

# types are checked beside the tests: alone they take a core for most of a minute
test: style
	$(BIN)/mypy & types=$$!; $(BIN)/python -m pytest -n 3 --dist worksteal; told=$$?; wait $$types && exit $$told

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

# the page follows from papers/ and results/; a test compares it
ledger: setup
	$(BIN)/askew ledger --out docs/reproduction.md

clean:
	rm -rf $(VENV) site demo runs build *.egg-info src/*.egg-info
