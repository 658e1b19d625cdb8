# make test, make bench: each makes .venv and installs what is missing.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
JOBS ?= 2
TESTS ?= tests

.PHONY: test test-thorough test-capabilities test-cuda test-cuda-torch test-torch smoke-torch test-trainers bench bench-all fuzz mutants lint format site

# Installs into a .venv that is there already, too. Of what megatron-core asks for, its cross entropies import
# numpy and packaging only. It has no wheel for every Python.
NO_MEGATRON := echo "megatron-core cannot be installed here: its tests are skipped"

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools numpy packaging torch
	$(PIP) --no-build-isolation --editable ".[test,bench,triton,dev]"
	$(PIP) --no-deps megatron-core || $(NO_MEGATRON)
	touch $@

$(VENV): $(INSTALLED)

test: $(INSTALLED)
	$(PY) -m pytest -n $(JOBS) -m "not slow and not thorough and not trainers" $(TESTS)

test-thorough: $(INSTALLED)
	$(PY) -m pytest -n $(JOBS) -m "thorough and not slow and not trainers" $(TESTS)

# The numerical tests with each set of vector instructions that this machine has; QUICK=--quick: what CI runs of them.
test-capabilities: $(INSTALLED)
	$(PY) tests/capabilities.py $(QUICK) -n $(JOBS)

# On a stand-in for a CUDA device, no GPU (tests/cuda/standin): with values at small sizes, then without at those of
# production. Where it cannot be built, it says why.
STANDIN = $(1) -m tests.cuda.standin
ON_STANDIN = $(call STANDIN,$(1)) $(1) -m pytest -n $(JOBS) tests/cuda \
	&& $(call STANDIN,$(1)) --no-kernels $(1) -m pytest -n $(JOBS) tests/cuda/at_size \
	|| test $$? -eq 75

test-cuda: $(INSTALLED)
	$(call ON_STANDIN,$(PY))

# Another release of torch, with the triton that it ships with: make test-torch VERSION=2.11.0
OTHER := .venv-$(VERSION)

# The long part, which nothing of this tree is in.
$(OTHER)/.torch: constraints.txt
	@test -n "$(VERSION)" || { echo "which torch? make test-torch VERSION=2.11.0"; exit 2; }
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	grep -vE '^(#|(torch|triton|setuptools)==)' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(OTHER)/constraints.txt \
		torch==$(VERSION) "setuptools>=77" numpy packaging
	touch $@

$(OTHER)/.installed: pyproject.toml $(OTHER)/.torch
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(OTHER)/constraints.txt \
		--no-build-isolation --editable ".[test,bench,triton]"
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps megatron-core \
		|| $(NO_MEGATRON)
	touch $@

test-torch: $(OTHER)/.installed
	$(OTHER)/bin/python -m pytest -n $(JOBS) -m "not slow and not trainers" $(TESTS)

smoke-torch: $(OTHER)/.installed
	$(OTHER)/bin/python -m pytest -n $(JOBS) @tests/smoke.txt

test-cuda-torch: $(OTHER)/.installed
	$(call ON_STANDIN,$(OTHER)/bin/python)

# The examples over other people's trainers; what cannot be installed is skipped. Some ask for CUDA, vllm and more: of
# these the package alone is installed, and what its losses import. slime is in no registry: SLIME=/path/to/a/checkout.
TRAINERS := .venv-trainers
OF_THEIR_LOSSES := triton pillow ray tensordict orjson hydra-core codetiming pandas tyro einops hjson py-cpuinfo ninja pylatexenc httpx requests
TRL_WITH_LOGITS := $(TRAINERS)/trl-1.10
WITHOUT_THE_REST := megatron-core torchtitan spmd_types verl deepspeed openrlhf

$(TRAINERS)/.installed: pyproject.toml constraints.txt
	test -x $(TRAINERS)/bin/python || $(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		setuptools numpy packaging torch
	$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--no-build-isolation --editable ".[test]"
	for package in transformers accelerate peft trl $(OF_THEIR_LOSSES); do \
		$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $$package \
			|| echo "$$package cannot be installed here: its tests are skipped"; done
	for package in $(WITHOUT_THE_REST); do \
		$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps $$package \
			|| echo "$$package cannot be installed here: its tests are skipped"; done
	$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(TRL_WITH_LOGITS) trl==1.10.0 \
		|| echo "trl 1.10 cannot be installed here: its tests are skipped"
	touch $@

test-trainers: $(TRAINERS)/.installed
	PYTHONPATH=$(SLIME) $(TRAINERS)/bin/python -m pytest -m trainers tests/trainers
	PYTHONPATH=$(TRL_WITH_LOGITS) $(TRAINERS)/bin/python -m pytest -m trainers tests/trainers/test_trl_logits.py \
		|| test $$? -eq 5 # nothing to run: it could not be installed

fuzz: $(INSTALLED)
	$(PY) -m pytest -n $(JOBS) -m slow --timeout 0 $(TESTS)

# ONLY: files, --sample 5, --since HEAD~1; all of fx_passes takes many hours.
mutants: $(INSTALLED)
	$(PY) tests/mutants.py --workers $(JOBS) $(ONLY)

# A first table in about two minutes, and the whole one. RESUME=--resume goes on after an interruption.
bench: $(INSTALLED)
	$(PY) -m bench $(RESUME)

bench-all: $(INSTALLED)
	$(PY) -m bench table $(RESUME)

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(INSTALLED)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# The documents as pages in build/site, links and anchors checked; ruff lays out the signatures of docs/api.md. Where
# mkdocs cannot be installed, it says so.
SITE := .venv-site

site:
	test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		mkdocs mkdocs-material mkdocs-same-dir mkdocstrings mkdocstrings-python ruff \
		|| echo "mkdocs cannot be installed here: no site"
	! $(SITE)/bin/python -c "import material, mkdocstrings_handlers.python" 2>/dev/null \
		|| NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(SITE)/bin/python -m mkdocs build
