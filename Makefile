# All commands set everything up from a fresh clone. ARGS goes to train.py, TESTS to pytest, NAMES to results.py.
# CONFIG: what is faster to a score than synchronous training with each seed, see docs/results.md; configs/tiny.toml is
# on-policy.
PYTHON ?= python3
# A GPU for each rank, on a machine that has one.
RANKS ?= $(if $(filter 1,$(shell nvidia-smi -L 2>/dev/null | wc -l)),1,2)
CONFIG ?= configs/rollflash.toml
VENV := .venv
unexport PYTHONDONTWRITEBYTECODE  # else ranks and tests' workers compile all of our modules each time that they start

.PHONY: train test test-fast test-all lint notebook figures results results-quick
train: $(VENV)/ready
	$(VENV)/bin/python train.py --ranks=$(RANKS) --config $(CONFIG) $(ARGS)

test: $(VENV)/ready-dev
	$(VENV)/bin/python -m pytest -m "not thorough" $(TESTS)

# With further cases of what other tests hold (marked thorough).
test-all: $(VENV)/ready-dev
	$(VENV)/bin/python -m pytest $(TESTS)

# Without what starts ranks, programs or whole runs, or takes long (marked slow).
test-fast: $(VENV)/ready-dev
	$(VENV)/bin/python -m pytest -m "not slow and not thorough" $(TESTS)

lint: $(VENV)/ready-dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

# The first hour as a notebook, without Jupyter: a warm start, a step by hand, a short run.
notebook: $(VENV)/ready
	$(VENV)/bin/python docs/run_notebook.py docs/first_hour.ipynb

# The paper's tables and figures, simulated on one core; each also runs alone.
figures: $(VENV)/ready
	for figure in table1 table2 table3 table4 fig04 fig09 fig10 fig11 fig12 fig14 within_round \
		flash_split flash_scaling flash_ratio flash_queue flash_envs flash_redundant flash_parts \
		mux_cost mux_trace mux_drift mux_quantile mux_sync \
		mux_theorem mux_pair mux_micro mux_tail mux_async mux_memory; do \
		$(VENV)/bin/python figures/$$figure.py || exit 1; \
	done

# Run the benchmarks whose numbers are missing or older than the code (NAMES="trl soak": those; NAMES=all: all, hours)
# and write the numbers into the documents. Wants a quiet machine; may be stopped and started again.
results: $(VENV)/ready
	$(VENV)/bin/python benchmarks/results.py run $(NAMES)

# Every benchmark at its smallest, to see that it works; keeps nothing.
results-quick: $(VENV)/ready
	$(VENV)/bin/python benchmarks/results.py run --quick $(or $(NAMES),all)

$(VENV)/ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is no Python of 3.11 or newer; give one: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -r requirements.txt
	touch $@

$(VENV)/ready-dev: requirements-dev.txt $(VENV)/ready
	$(VENV)/bin/python -m pip install --quiet -r requirements-dev.txt
	touch $@
