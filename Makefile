# Two commands are all a newcomer needs: `make demo` and `make test`. Each sets up what it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
NATIVE := $(shell find native -name '*.cpp' -o -name '*.hpp' 2>/dev/null)

.PHONY: demo test lint bench setup native format clean

demo: setup
	$(BIN)/gradwire demo $(DEMO_ARGS)

test: setup
	$(BIN)/python -m pytest $(TEST_ARGS)

lint: setup
	$(BIN)/ruff check src tests examples fuzz
	$(BIN)/ruff format --check src tests examples fuzz
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(find native -name '*.cpp' -o -name '*.hpp')

bench: setup
	$(BIN)/gradwire bench sweep --quick

format: setup
	$(BIN)/ruff check --fix src tests examples fuzz
	$(BIN)/ruff format src tests examples fuzz
	$(BIN)/clang-format -i $$(find native -name '*.cpp' -o -name '*.hpp')

setup: $(STAMP)

# torch comes first and pinned: an unpinned request would take the registry's newest build with its CUDA packages.
# The build tools come next, so that the extension is built in this environment (no isolated download per build).
$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy scikit-build-core nanobind cmake ninja
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[bench,report,tensorboard,dev]'
	touch $@

# For work on the native core: rebuild the extension in place and use it with PYTHONPATH=src.
native:
	cmake -S . -B build/inplace -G Ninja -DPython_EXECUTABLE=$$($(BIN)/python -c 'import sys; print(sys.executable)') \
	    -DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$(CURDIR)/src/gradwire -DCMAKE_EXPORT_COMPILE_COMMANDS=ON > /dev/null
	cmake --build build/inplace

clean:
	rm -rf build $(VENV) src/gradwire/_native*.so
