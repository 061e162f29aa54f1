# Both commands set everything up from a fresh clone. ARGS goes to train.py, TESTS to pytest.
PYTHON ?= python3
RANKS ?= 2
VENV := .venv

.PHONY: train test
train: $(VENV)/ready
	$(VENV)/bin/torchrun --shutdown-timeout=600 --nproc_per_node=$(RANKS) train.py --config configs/tiny.toml $(ARGS)

test: $(VENV)/ready
	$(VENV)/bin/python -m pytest $(TESTS)

$(VENV)/ready: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -r requirements.txt
	touch $@
