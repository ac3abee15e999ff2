# Every target sets up what it needs.  `make test PYTHON=python3.13` uses another Python.

PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
KILLS ?= 10000
# One stamp a Python: asking for another one makes the environment anew.
STAMP := $(VENV)/.installed-$(subst /,-,$(PYTHON))

.PHONY: demo test check lint types bench drill explore clean
.NOTPARALLEL:

demo: $(STAMP)
	$(RUN) examples/demo.py

test: $(STAMP)
	$(RUN) -m pytest -q $(PYTEST_ARGS)

check: lint types test

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(STAMP)
	$(RUN) -m mypy --strict

# Some minutes; writes benchmarks/RESULTS.md and results.svg.  `make bench PEERS=1` first installs
# what holdfast is compared with; without it those rows say that they are missing.
bench: $(STAMP)
	$(if $(PEERS),$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[bench-peers]')
	$(RUN) benchmarks/run_all.py $(BENCH_ARGS)

# Real processes and real SIGKILL: some minutes.
drill: $(STAMP)
	$(RUN) -m holdfast.cli drill --kills $(KILLS)

# Every crash that the workloads can meet, power cuts included: some minutes.
explore: $(STAMP)
	$(RUN) -m holdfast.recovery.explore $(EXPLORE_ARGS)

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment is made only if it is missing or of another Python; pip takes its settings from
# the machine.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "$(PYTHON) is older than 3.11: give another one with PYTHON=" >&2; exit 1; }
	@test "$$($(RUN) -V 2>&1)" = "$$($(PYTHON) -V 2>&1)" \
	    || { echo "making $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
