# Everything runs in .venv, which is made on first use and again when the dependencies change.
# Needs python3 (3.10 or newer, with its venv module) and make; PYTHON=python3.12 chooses another interpreter.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

# What computes: its tests must pass whatever way the machine adds up.
NUMERIC := $(addprefix tests/,recalibration ops experts cases distributed \
	test_layer.py test_routing.py test_control.py test_control_guard.py)

.PHONY: help demo paper paper-test test test-slow test-portable lint format clean

help:
	@echo "make demo           train three variants of a small model and compare them (minutes)"
	@echo "make test           the test suite"
	@echo "make test-slow      the tests that take minutes"
	@echo "make test-portable  the numeric tests as other machines would compute them (before a release)"
	@echo "make paper          list the commands that try the paper's claims"
	@echo "make paper-test     their tests"
	@echo "make lint           ruff and mypy"
	@echo "make format         let ruff format the code"
	@echo "make clean          remove .venv and what the demo wrote"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "LRMoE needs Python 3.10 or newer: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv .venv || \
		{ echo "python3 has no venv module: install it (Debian and Ubuntu: python3-venv)" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e ".[train,dev]" -c constraints.txt
	@touch $(READY)

demo: $(READY)
	$(BIN)/lrmoe compare --model qwen3-moe-tiny --steps 150 --seeds 0 --jobs 3 --eval-every 50 --eval-sequences 128 \
		--variant "C0: drop=0" \
		--variant "C20 pps: drop=0.2 selector=pps guard_variance=none" \
		--variant "C20 topq: drop=0.2 selector=topq guard_tail=none" \
		--out runs/demo --overwrite

# File by file on two workers: the tests of one share its fixtures and its pool of ranks.
test: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow tests paper/tests

test-portable: $(READY)
	ATEN_CPU_CAPABILITY=default $(BIN)/python -m pytest $(NUMERIC) --round-by-shape
	MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 $(BIN)/python -m pytest $(NUMERIC)
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest $(NUMERIC) --threads 2

paper: $(READY)
	$(BIN)/python -m paper --help

paper-test: $(READY)
	$(BIN)/python -m pytest paper/tests

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv runs/demo
