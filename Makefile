.PHONY: demo test check install bench-peers clean
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
SOURCES := pyproject.toml CMakeLists.txt $(wildcard windlass/kernels/cpu/*.cpp windlass/kernels/cpu/*.hpp)
PEERS := .venv-peers

demo: install
	$(BIN)/windlass demo

test: install
	$(BIN)/python -m pytest -n 2

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

install: $(STAMP)

$(STAMP): $(SOURCES)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

# Their own environments: none of them is needed by the package. An hour, on a quiet machine.
bench-peers: install $(PEERS)/installed
	$(BIN)/python benchmarks/peers/run.py
	$(BIN)/python benchmarks/peers/tables.py $(PEERS)/samples.jsonl

$(PEERS)/installed:
	$(PYTHON) -m venv $(PEERS)/llama-cpp
	CMAKE_ARGS="-DGGML_NATIVE=ON" $(PEERS)/llama-cpp/bin/pip install --no-binary llama-cpp-python llama-cpp-python gguf
	$(PYTHON) -m venv $(PEERS)/mlx
	-$(PEERS)/mlx/bin/pip install 'mlx[cpu]' mlx-lm
	touch $@

clean:
	rm -rf .venv $(PEERS) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
