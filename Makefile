# Every target sets up its own virtual environment in .venv the first time.
#
#   PYTHON  the interpreter to make it with (3.10 to 3.13)
#   TORCH   what pip is told to install first; any pip arguments, so another version or a
#           CPU-only wheel can be chosen:  make test TORCH="torch==2.14.1"
#   JOBS    how many tests run at once

PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 2

VENV := .venv
PYTEST := $(VENV)/bin/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-zoo test-soak test-gpu check fix clean FORCE
.PRECIOUS: $(VENV)/stamp-%
.NOTPARALLEL:

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/stamp-test ## Fuse a small tensor-parallel Llama and compare it with eager
	$(VENV)/bin/python -m fx_fusion.demo $(ARGS)

test: $(VENV)/stamp-test ## Run the tests that need no GPU
	$(PYTEST) -n $(JOBS) --dist loadfile -m "not gpu and not zoo and not soak" $(ARGS)

test-zoo: $(VENV)/stamp-test ## Compile every model of the zoo on two real ranks (long)
	$(PYTEST) -m zoo $(ARGS)

test-soak: $(VENV)/stamp-test ## Run the CPU kernel a million times on two and three ranks
	$(PYTEST) -m soak $(ARGS)

test-gpu: $(VENV)/stamp-test ## Run the tests that need a CUDA or HIP device
	$(PYTEST) -m gpu $(ARGS)

check: $(VENV)/stamp-dev ## ruff, ruff format and mypy --strict
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	.ci/typecheck $(VENV)

fix: $(VENV)/stamp-dev ## Apply ruff's fixes and its format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean: ## Remove the virtual environment and all caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is newer than what it depends on exactly when the environment matches it.
$(VENV)/stamp-%: pyproject.toml .ci/setup $(VENV)/torch-requirement
	.ci/setup $(VENV) $* "$(PYTHON)" "$(TORCH)"
	@touch $@

# Holds TORCH, and is written only when that changes, so that another TORCH sets up again.
$(VENV)/torch-requirement: FORCE
	@mkdir -p $(VENV)
	@echo "$(TORCH)" | cmp -s - $@ || echo "$(TORCH)" > $@

FORCE:
