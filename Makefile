# Two commands on a fresh machine: `make demo` and `make test`. Each makes the virtual environment it needs (.venv).

PYTHON ?= python3
WORKERS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=
RELEASE_ARGS ?=
VERSIONS_ARGS ?=
README_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NEWEST := $(VENV)/newest-triton
# Bytes that a WebGPU kernel may see at once, in a test: one head of the attention cases fits, one row of the others does.
ONE_HEAD := 147456
ONE_ROW := 66560

# What runs in Triton's interpreter, and what the newest Triton compiles as well. Repeats are for GPUs: the interpreter has one
# order of sums.
INTERPRETED := tests/test_conformance.py tests/test_attention_inputs.py tests/test_triton_decode.py \
    tests/test_triton_bf16x3.py tests/test_triton_rows.py tests/test_hopper_interpreted.py \
    tests/test_hopper_gluon.py tests/test_hopper_gluon_scores.py tests/test_hopper_gluon_padded.py \
    tests/test_hopper_mask_tiles.py tests/test_hopper_turns.py tests/test_hopper_padded.py tests/test_hopper_sweep.py \
    tests/test_hopper_folded_lengths.py tests/test_integration_flash_attn.py tests/test_integration_onnx.py \
    tests/test_integration_sdpa.py tests/test_integration_transformers.py tests/test_dropout.py tests/test_glu.py \
    tests/test_rope.py tests/test_layer_norm.py \
    tests/test_add_rms_norm.py tests/test_linear_cross_entropy.py
COMPILED := tests/test_triton_compiles.py tests/test_triton_rows_compile.py tests/test_triton_tile_tables.py
HOPPER_FORWARD := tests/test_hopper_compiles.py
HOPPER_BACKWARD := tests/test_hopper_backward_compiles.py

# Debian packages that the tests need. Missing ones are installed when make runs as root, and named when it does not.
# (python3-venv is asked for by itself, only where Python cannot make virtual environments.)
# WebGPU runs on software Vulkan where there is no GPU; the report and the browser page are driven in Chromium.
TEST_PACKAGES := libvulkan1 mesa-vulkan-drivers chromium

# One thread per worker: the workers share the cores.
PYTEST = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-slow lint format readme hub-kernel system-packages clean

help:
	@echo "make demo     train a small transformer, generate text with it, look at its attention  (DEMO_ARGS='--steps 100')"
	@echo "make test     the test suite                 (WORKERS=2, PYTEST_ARGS='-k softmax')"
	@echo "make test-all the same, then what is slow by nature"
	@echo "make docs     build the site into build/site, strictly"
	@echo "make release  build wheel and sdist, install each in a fresh environment and run its commands"
	@echo "make test-versions  the wheel on Python 3.12 with the oldest PyTorch and on 3.13 with the newest (part of test-all)"
	@echo "make lint     ruff and mypy"
	@echo "make format   let ruff reformat the code"
	@echo "make readme   write the tables and charts of README.md and docs from bench/results (README_ARGS=--measure: check this CPU first)"
	@echo "make hub-kernel lay the package out as a kernel of the Hugging Face Hub, in dist/hub-kernel"
	@echo "make clean    remove the virtual environment and the caches"

demo: $(STAMP)
	@$(BIN)/headwise demo $(DEMO_ARGS)

# Everything that finds faults, once. What is slow by nature (more cases, seeds and devices of the same) is in test-all.
test: $(STAMP) $(NEWEST)/.installed
	@PYTHON=$(PYTHON) scripts/system-packages $(TEST_PACKAGES)
	$(PYTEST) -m "not slow" -k "not webgpu" $(PYTEST_ARGS)
	@echo "headwise: the WebGPU kernels"
	$(PYTEST) -m "not slow" -k webgpu --hypothesis-profile=software
	@echo "headwise: the Triton kernels, in Triton's interpreter"
	TRITON_INTERPRET=1 $(PYTEST) -m "not slow" -k "(triton or hopper) and not same_bits_every_time" $(INTERPRETED)
	@echo "headwise: the Gluon kernels of the backward, compiled by the newest release of Triton"
	PYTHONPATH=$(NEWEST) $(PYTEST) -m "not slow" $(HOPPER_BACKWARD)

test-all: test test-slow test-versions

test-slow: $(STAMP) $(NEWEST)/.installed
	$(PYTEST) -m slow -k "not webgpu"
	$(PYTEST) -m slow -k webgpu --hypothesis-profile=software
	TRITON_INTERPRET=1 $(PYTEST) -m slow -k "triton or hopper" $(INTERPRETED)
	@echo "headwise: the other Triton kernels, compiled by the newest release of Triton"
	PYTHONPATH=$(NEWEST) $(PYTEST) -m "not slow" $(COMPILED) $(HOPPER_FORWARD)
	@echo "headwise: the WebGPU kernels with what every WebGPU device has, and no more"
	HEADWISE_WEBGPU_TIER=A $(PYTEST) -k webgpu tests/test_conformance.py tests/test_attention_inputs.py
	@echo "headwise: the WebGPU kernels on tensors that are larger than a kernel may bind"
	HEADWISE_WEBGPU_BINDING=$(ONE_HEAD) $(PYTEST) -k "webgpu and attention" tests/test_conformance.py
	HEADWISE_WEBGPU_BINDING=$(ONE_ROW) $(PYTEST) -k "webgpu and not attention" tests/test_conformance.py

.PHONY: docs release test-versions

# Material says at every build that it will be followed by another program; that is no warning about these pages.
docs: $(STAMP)
	$(BIN)/python scripts/draw_grids.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "headwise: the site is in build/site"

# Takes minutes: PyTorch is installed once for each. --brief: the sdist into the environment of the wheel, two ops.
release: $(STAMP)
	PYTHON=$(BIN)/python scripts/try-release $(RELEASE_ARGS)

# Other Pythons and PyTorches. --brief: every Python compiles the sources; no PyTorch, seconds.
test-versions: $(STAMP)
	PYTHON=$(BIN)/python scripts/try-versions $(VERSIONS_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

readme: $(STAMP)
	$(BIN)/python scripts/update_readme.py $(README_ARGS)

hub-kernel:
	@$(PYTHON) scripts/hub_kernel.py

system-packages:
	@PYTHON=$(PYTHON) scripts/system-packages

# Made once; made again when what it is made of changes. The stamp is written last, so that a broken install is redone.
$(STAMP): pyproject.toml constraints.txt requirements-test.txt
	@$(MAKE) --no-print-directory system-packages
	@echo "headwise: making the virtual environment $(VENV) (torch is large: this takes a few minutes)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-test.txt || { \
	    echo "headwise: pip could not install requirements-test.txt (its reason is above)." ; \
	    echo "  torch and triton are pinned in constraints.txt. A CUDA build of torch brings its own triton and several" ; \
	    echo "  gigabytes with it: give pip a source of CPU builds (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS or pip.conf)." ; \
	    exit 1 ; }
	@touch $@

# The newest Triton, beside the one that matches PyTorch: compiling needs no GPU and no PyTorch.
$(NEWEST)/.installed: requirements-newest-triton.txt $(STAMP)
	@echo "headwise: installing the newest Triton into $(NEWEST)"
	@rm -rf $(NEWEST)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(NEWEST) -r $<
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
