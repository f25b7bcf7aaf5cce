# Each target sets up all it needs: a virtual environment, the pinned tools of requirements/, and Debian packages where pip
# has none. What is set up or built is not made again; what depends on a changed file is.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.ONESHELL:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
TORCH ?= 2.13.0
VENV ?= .venv$(if $(filter system,$(TORCH)),-system)
WHEEL ?=
GRID ?=
JOBS ?= $(shell nproc)
ARGS ?=
BASE ?= main

override VENV := $(abspath $(VENV))
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input
export PATH := $(VENV)/bin:$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)
export TK_JOBS ?= $(JOBS)
# What is tested is the installed package, never this folder by way of the caller's environment.
unexport PYTHONPATH PYTHONHOME TK_LIBRARY_DIR TK_NO_LIBRARY TK_PACK_PATH CMAKE_ARGS

# The pack that serves this machine's GPU; sm_90's without one.
LOCAL_ARCH = $(shell tools/local_arch.sh)
# Where no GPU will run them, a few kernels show what all of them would: minutes instead of half an hour on two cores.
LOCAL_GRID = $(or $(GRID),$(if $(shell command -v nvidia-smi),full,sample))

.PHONY: help
help: ## this list
	@echo 'Targets:'
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | while IFS=$$'\t' read -r name text; do \
	  printf '  %-12s %s\n' "$$name" "$$text"; done
	@printf '%s\n' '' 'Variables (make demo TORCH=system):' \
	  '  PYTHON=$(PYTHON)   the Python that the virtual environment is made from' \
	  '  VENV=.venv         where it is made (.venv-system for TORCH=system)' \
	  '  TORCH=$(TORCH)     its torch, from pip; "system": the torch that PYTHON already has (2.11 or newer)' \
	  '  WHEEL=FILE         install this wheel instead of building one: then neither a compiler nor Triton is needed' \
	  '  GRID=              "full": every kernel; "sample": the few that touch every axis (demo'"'"'s default without a GPU)' \
	  '  JOBS=$(JOBS)             compilations at once' \
	  '  ARGS=              passed on to the demo, to pytest (gpu-test) or to the benchmarks'

# --- What is built: a wheel for each purpose, each with its own build tree ---

# What torch's own wheels need (manylinux_2_28). The tag of a wheel follows from what its libraries need, not from this.
OLDEST_GLIBC ?= 2.28
# The time of all files in what is built: the commit's, so that it is the same bytes whenever it is built.
EPOCH = $(or $(SOURCE_DATE_EPOCH),$(shell git log -1 --format=%ct 2>/dev/null || date +%s))

# $(call build_wheel,NAME,GRID,ARCHS[,ONLY]): build/NAME/dist/torch_tk-*.whl, ONLY: a regular expression of kernels.
# CMake builds only what changed.
define build_wheel
	tools/debian_packages.sh g++ libzstd-dev libssl-dev
	rm -rf build/$(1)/dist
	SOURCE_DATE_EPOCH=$(EPOCH) TK_BUILD_DIR=build/$(1) \
	  CMAKE_ARGS='-DTK_GRID=$(2) -DTK_ARCHS=$(3) -DTK_ONLY=$(4) -DTK_OLDEST_GLIBC=$(OLDEST_GLIBC)' \
	  $(PIP) wheel --verbose --no-deps --no-build-isolation --wheel-dir build/$(1)/dist .
endef

# $(call install,FILE): into the virtual environment, with the torch that is there.
define install
	$(PIP) install --quiet --no-deps --force-reinstall $(1)
endef

# What the demo runs (python/tk/cli/demo.py, demo_ops.py): a quarter of the kernels, or of the sample a seventh.
DEMO = ^(mm_(?!plus)|(rms_norm|add_rms_norm|layer_norm|softmax|swiglu|gelu|column_sum)(?!_))

.PHONY: demo
demo: install-demo ## build what it runs, for this machine's GPU (without one a sample of sm_90), install it, run it
	cd build && $(PY) -m tk demo $(ARGS)

.PHONY: install-demo
ifeq ($(WHEEL),)
install-demo: build-tools
	$(call build_wheel,demo,$(LOCAL_GRID),$(LOCAL_ARCH),$(DEMO))
	$(call install,build/demo/dist/torch_tk-*.whl)
else
install-demo: install-local
endif

.PHONY: wheel
wheel: build-tools ## the wheel that ships: sm_80, sm_90 and PTX, in dist/
	$(call build_wheel,wheel,$(or $(GRID),full),80$(comma)90$(comma)ptx80)
	mkdir -p dist
	rm -f dist/*.whl
	cp build/wheel/dist/torch_tk-*.whl dist/
	ls -l dist

.PHONY: dist
dist: wheel ## what a release has, in dist/: the wheel, the source distribution, their checksums
	rm -f dist/*.tar.gz
	SOURCE_DATE_EPOCH=$(EPOCH) $(PY) -c 'from setuptools import build_meta; build_meta.build_sdist("dist")'
	(cd dist && sha256sum torch_tk-* >SHA256SUMS)

.PHONY: check-dist
check-dist: release-tools ## look at what is in dist/ as an index does (twine), and at the wheel's tag (auditwheel)
	(cd dist && sha256sum --check SHA256SUMS)
	$(PY) -m twine check --strict dist/torch_tk-*
	$(PY) -m auditwheel show --json dist/torch_tk-*.whl | $(PY) tools/check_audit.py

.PHONY: build-times
build-times: build-tools ## time the whole grid with an empty cache (dist/build.json, for the benchmarks); up to an hour
	$(PY) tools/time_build.py --jobs $(JOBS)

comma := ,

.PHONY: install-local
ifeq ($(WHEEL),)
install-local: build-tools
	$(call build_wheel,local,$(LOCAL_GRID),$(LOCAL_ARCH))
	$(call install,build/local/dist/torch_tk-*.whl)
else
install-local: $(VENV)/.torch
	mkdir -p build
	$(call install,$(WHEEL))
endif

# --- Tests ---

# By file: what a module's tests build, they build once.
PARALLEL = --numprocesses $(JOBS) --maxprocesses 8 --dist loadfile --durations 12

.PHONY: test
test: test-cpp test-python test-install ## the tests that need no GPU; of those that are many alike a fresh third

.PHONY: test-all
test-all: export TK_DRAWN := all
test-all: test ## every test that needs no GPU

.PHONY: quick
quick: sample lint ## lint and the tests of what has changed since BASE=main: minutes, before every commit
	$(PY) tools/touched_tests.py $(BASE)

.PHONY: sample
sample: build-tools test-tools
	$(call build_wheel,sample,sample,80$(comma)90)
	$(call install,build/sample/dist/torch_tk-*.whl)

.PHONY: test-python
# What is drawn follows from TK_SEED, TK_DRAWN names those of the many alike that run. Pytest prints both: given again,
# the same ones run.
test-python: sample
	export TK_SEED=$${TK_SEED:-$$(od -An -N3 -tu4 /dev/urandom | tr -d ' ')}
	export TK_DRAWN=$${TK_DRAWN:-$$TK_SEED}
	$(PY) -m pytest tests/unit tests/codegen $(PARALLEL)
	$(PY) -m pytest tests/kernels $(PARALLEL)
	$(PY) -m pytest tests/ops $(PARALLEL)
	$(PY) -m pytest tests/flex $(PARALLEL)
	$(PY) -m pytest tests/use $(PARALLEL)
	$(PY) -m pytest tests/parallel $(PARALLEL)

.PHONY: test-install
test-install: sample
	$(PY) -m pytest tests/install --wheel build/sample/dist/torch_tk-*.whl $(PARALLEL)

.PHONY: test-cpp
test-cpp: test-asan test-tsan

.PHONY: test-asan test-tsan
test-asan: SANITIZE := address,undefined
test-tsan: SANITIZE := thread
test-asan test-tsan: test-%: build-tools
	tools/debian_packages.sh g++ libzstd-dev libssl-dev libgtest-dev
	cmake -S . -B build/$* -G Ninja -DTK_SANITIZE=$(SANITIZE) -DTK_BUILD_TESTS=ON -DTK_PACKS=OFF -DTK_BUILD_OPS=OFF
	cmake --build build/$* --target tk_tests
	ctest --test-dir build/$* --output-on-failure --no-tests=error -j $(JOBS)

.PHONY: gpu-test
gpu-test: install-local ## the tests on this machine's GPU
	$(PY) -c 'import pytest' 2>/dev/null || $(PIP) install --quiet -r requirements/test.txt
	$(PY) -m pytest tests/gpu -m gpu $(ARGS)

.PHONY: bench
bench: install-local ## the benchmarks on this machine's GPU; results in benchmarks/results
	$(PY) -m benchmarks $(ARGS)

# --- Form ---

.PHONY: lint
lint: build-tools test-tools lint-tools ## ruff, mypy, clang-format, zizmor, and whether README's and docs' tables are up to date
	status=0
	ruff check . || status=1
	ruff format --check . || status=1
	mypy || status=1
	git ls-files '*.h' '*.cpp' '*.c' | xargs clang-format --dry-run --Werror || status=1
	zizmor --offline --quiet .github/workflows || status=1
	$(PY) tools/readme.py --check || status=1
	if $(HAS_TK); then $(PY) tools/supported.py --check || status=1; fi
	exit $$status

.PHONY: format
format: lint-tools ## rewrite the sources as lint wants them
	ruff check --fix .
	ruff format .
	git ls-files '*.h' '*.cpp' '*.c' | xargs clang-format -i

.PHONY: readme
readme: build-tools ## README's and docs' tables, from the kernels and from benchmarks/results; pictures of masks
	$(PY) tools/readme.py
	PYTHONPATH=python $(PY) tools/masks.py
	if $(HAS_TK); then $(PY) tools/supported.py
	else echo 'docs/supported.md is as it was: it takes an installed tk (make sample)'; fi

.PHONY: docs
docs: sample docs-tools ## the site of docs/, in build/docs; follows every link of it
	$(PY) -m pytest tests/site --site build/docs

# Whether tk is installed with its library: what calls its functions needs that, and nothing else here does.
HAS_TK = $(PY) -c 'import tk' 2>/dev/null

.PHONY: clean
clean: ## remove what was built; the virtual environment and the compiler's cache (~/.cache/tk) stay
	rm -rf build dist python/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path '$(VENV)' -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

# --- Set-up. A stamp for each set of tools, older than its list of requirements: installed again ---

$(VENV)/.made:
	tools/make_venv.sh '$(PYTHON)' '$(VENV)' '$(TORCH)'
	touch $@

$(VENV)/.torch: requirements/torch.txt $(VENV)/.made
ifeq ($(TORCH),system)
	$(PY) tools/check_torch.py
else
	$(PIP) install --quiet torch==$(TORCH)
endif
	touch $@

# Installed over what the system's Python may offer, at the pinned versions.
$(VENV)/.%-tools: requirements/%.txt $(VENV)/.torch
	$(PIP) install --quiet -r $<
	touch $@

.PHONY: build-tools test-tools lint-tools docs-tools release-tools
build-tools test-tools lint-tools docs-tools release-tools: %: $(VENV)/.%
