# Each target creates .venv and installs its requirements on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo compare test storm lint docs screenshots bench bench-processes bench-peers structure peers reproduce clean

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/.peers: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[peers]'
	touch $@

demo: $(VENV)/.installed  ## train a small language model with learned and with uniform weights: under 3 minutes
	$(BIN)/mixwell demo

compare: $(VENV)/.installed  ## compare all methods on small MNIST, 3 seeds: about 25 minutes on two cores; runs/compare-mnist
	$(BIN)/mixwell compare mnist --seeds 3

test: $(VENV)/.installed  ## all tests except those in tests/peers
	$(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder

storm: $(VENV)/.installed  ## a fuzzer of the command line; MIXWELL_STORM_SEED, MIXWELL_STORM_SCALE=5 for more cases
	$(BIN)/pytest -q -s -m storm tests/storm

lint: $(VENV)/.installed  ## ruff and pyright; runs all, even if one fails
	status=0; $(BIN)/ruff check . || status=1; $(BIN)/ruff format --check . || status=1; $(BIN)/pyright || status=1; exit $$status

docs: $(VENV)/.installed  ## build the documentation site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

screenshots: docs  ## screenshots of the report and the site in docs/assets; needs Chromium
	$(BIN)/python docs/screenshots.py --site site

bench: $(VENV)/.installed  ## cost relative to plain training; resumes after an interruption
	$(BIN)/python bench/price.py
	$(BIN)/python bench/limits.py
	$(BIN)/python bench/overhead.py
	$(BIN)/python bench/growth.py
	$(BIN)/python bench/quality.py
	$(BIN)/python bench/sweep.py
	$(BIN)/python bench/trainer.py

bench-processes: $(VENV)/.installed  ## communication of two processes, and recovery from killed processes: about 10 minutes
	$(BIN)/python bench/communication.py
	$(BIN)/python bench/kills.py
	$(BIN)/python bench/kills.py --way fsdp --seed 1

bench-peers: $(VENV)/.peers  ## cost of other libraries
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python betty-ml==0.2.1
	$(BIN)/python bench/peers.py

structure: $(VENV)/.installed  ## size, imports and names of the code, compared with before the restructuring
	$(BIN)/python bench/structure.py --compare bench/results/structure-before.json

reproduce: $(VENV)/.installed  ## reproduce the paper's claims in small: about 10 minutes on two cores; runs/*/report.html
	$(BIN)/mixwell reproduce quadratic
	$(BIN)/mixwell reproduce bounds --quick
	$(BIN)/mixwell reproduce mnist --quick

# The tools that `mixwell export` writes for, in a separate folder, without dependencies that their readers do not need.
CONSUMERS := megatron-core==0.16.1 torchtitan==0.3.0 axolotl==0.19.0 llamafactory==0.9.5 tyro==1.0.16 typeguard==4.6.0 \
	docstring_parser==0.18.0 spmd_types==0.2.3 torchdata==0.11.0 peft==0.18.1 omegaconf==2.4.0 \
	addict==2.4.0 posthog==7.79.0 numba==0.68.1 llvmlite==0.50.0 trl==1.16.0

$(VENV)/.consumers: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/consumers $(CONSUMERS)
	touch $@

peers: $(VENV)/.peers $(VENV)/.consumers  ## cross-checks with TorchOpt, JAX and the tools that read exported mixtures
	PYTHONPATH=$(VENV)/consumers $(BIN)/pytest -q -m peers tests/peers

clean:
	rm -rf $(VENV)
