# Each target creates .venv and installs what it needs; the second time it is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint bench bench-peers peers reproduce clean

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/.peers: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[peers]'
	touch $@

demo: $(VENV)/.installed  ## a small language model learns its mixture, beside uniform mixing: under 3 minutes
	$(BIN)/mixwell demo

test: $(VENV)/.installed  ## all tests but the slow and the peers'
	$(BIN)/pytest -q -n 2

lint: $(VENV)/.installed  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(VENV)/.installed  ## what mixing costs beside plain training; continues where it was stopped
	$(BIN)/python bench/overhead.py
	$(BIN)/python bench/growth.py
	$(BIN)/python bench/quality.py
	$(BIN)/python bench/sweep.py

bench-peers: $(VENV)/.peers  ## what others cost, side by side
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python betty-ml==0.2.1
	$(BIN)/python bench/peers.py

reproduce: $(VENV)/.installed  ## the paper's claims, small: about 10 minutes on two cores; runs/*/report.html
	$(BIN)/mixwell reproduce quadratic
	$(BIN)/mixwell reproduce bounds --quick
	$(BIN)/mixwell reproduce mnist --quick

peers: $(VENV)/.peers  ## cross-checks with TorchOpt and JAX
	$(BIN)/pytest -q -m peers tests/peers

clean:
	rm -rf $(VENV)
