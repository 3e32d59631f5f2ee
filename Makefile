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
READY := $(VENV)/.ready-$(subst =,,$(TORCH))
CLUSTER := ring:ranks=16,alpha=30us,rate=10gbit

.PHONY: demo test quick frameworks torch-suite soak static check format docs clean

demo: $(READY)
	mkdir -p demo
	@echo "1. Live, on this machine."
	$(BIN)/anabranch demo --keep demo/run --force
	@echo
	@echo "2. Predicted: a DenseNet-201 recorded on an H200, on 16 of them and 10 Gbit/s Ethernet, then on 4 to 2048 and two networks."
	$(BIN)/anabranch compare --trace densenet201 --network $(CLUSTER)
	$(BIN)/anabranch scale --trace densenet201 --plot demo/scaling.svg --force
	@echo "The picture is in demo/scaling.svg. Try another model: $(BIN)/anabranch compare --trace resnet50 ..."
	@echo
	@echo "3. All of it as one page."
	@$(BIN)/anabranch compare --trace densenet201 --network $(CLUSTER) --json > demo/run/compare.json
	@$(BIN)/anabranch scale --trace densenet201 --json > demo/run/scale.json
	$(BIN)/anabranch report demo/run -o demo/report.html --force --title "anabranch demo"
	@echo "Open it in a browser: file://$(CURDIR)/demo/report.html"

test: $(READY)
	$(BIN)/pytest -n $(JOBS) --dist loadgroup

quick: $(READY)
	$(BIN)/pytest -n $(JOBS) --dist loadgroup --quick --durations 10 --durations-min 3

# With Transformers, Accelerate and Lightning themselves, which `make test` leaves out where they are not installed.
frameworks: $(READY)
	PIP_CONSTRAINT=$(VENV)/constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test-frameworks]'
	$(BIN)/pytest -n $(JOBS) --dist loadgroup tests/integrations tests/test_examples.py

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
