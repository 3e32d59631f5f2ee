# For a newcomer: `make demo`, `make quick` and `make test`. Each makes its own virtual environment first.
# Another torch: make test TORCH=torch==2.11.0

PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(shell grep '^torch==' constraints.txt)
BIN := $(VENV)/bin
JOBS ?= auto
SECONDS ?= 1500
SEED ?= 1
FAULTS ?= 1000
CASE ?=
RATE ?= 100mbit
READY := $(VENV)/.ready-$(subst =,,$(TORCH))

.PHONY: demo test test-all campaigns quick frameworks torch-suite soak static check format docs clean

# Without slow links: make demo RATE=unshaped
demo: $(READY)
	$(BIN)/anabranch demo --rate $(RATE) --keep demo --force

test: $(READY)
	$(BIN)/pytest -n $(JOBS) --dist loadgroup -m "not campaign"

# What `make test` leaves out because it takes long: a browser, programs under torchrun, injected faults, torch's own tests.
campaigns: $(READY)
	$(BIN)/pytest -n $(JOBS) --dist loadgroup -m campaign

test-all: $(READY)
	$(BIN)/pytest -n $(JOBS) --dist loadgroup

quick: $(READY)
	$(BIN)/pytest -n $(JOBS) --dist loadgroup --quick --durations 10 --durations-min 3

# With Transformers, Accelerate, Lightning, peft and torchao themselves, which `make test` leaves out where they are not installed.
frameworks: $(READY)
	PIP_CONSTRAINT=$(VENV)/constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test-frameworks]'
	$(BIN)/pytest -n $(JOBS) --dist loadgroup tests/frameworks tests/lean/test_low_bit_optimizers.py

torch-suite: $(READY)
	PYTHONPATH=tests $(BIN)/python -m torch_suite

static: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

check: static test

format: $(READY)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

$(READY): pyproject.toml constraints.txt Makefile
	@echo "Setting up $(VENV) with $(TORCH): a minute or two, once."
	$(PYTHON) -m venv $(VENV)
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	echo '$(TORCH)' >> $(VENV)/constraints.txt
	PIP_CONSTRAINT=$(VENV)/constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	rm -f $(VENV)/.ready-*
	touch $(READY)

# A seeded campaign of faults, with a report in benchmarks/; or one case again: make soak CASE=kill-any/oktopk/3/1/12/close
soak: $(READY)
	PYTHONPATH=src:tests $(BIN)/python -m soak $(if $(CASE),--case $(CASE),--seconds $(SECONDS) --seed $(SEED) --faults $(FAULTS) --report benchmarks)

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open file://$(CURDIR)/site/index.html, or, for the search too: $(PYTHON) -m http.server -d site"

clean:
	rm -rf $(VENV) demo site .pytest_cache .mypy_cache .ruff_cache .hypothesis
