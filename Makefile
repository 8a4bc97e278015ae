.PHONY: demo test coverage check install bench-peers clean
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
SOURCES := pyproject.toml CMakeLists.txt $(wildcard windlass/kernels/cpu/*.cpp windlass/kernels/cpu/*.hpp)
PEERS := .venv-peers

demo: install
	$(BIN)/windlass demo

test: install
	$(BIN)/python -m pytest -n 2

# The same tests with branch coverage and its floor, which takes two to three times as long.
coverage: install
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term:skip-covered

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
	PYTHONPATH=benchmarks $(BIN)/python -m peers.run
	PYTHONPATH=benchmarks $(BIN)/python -m peers.tables $(PEERS)/samples.jsonl

$(PEERS)/installed:
	$(PYTHON) -m venv $(PEERS)/llama-cpp
	CMAKE_ARGS="-DGGML_NATIVE=ON" $(PEERS)/llama-cpp/bin/pip install --no-binary llama-cpp-python llama-cpp-python gguf
	$(PYTHON) -m venv $(PEERS)/mlx
	-$(PEERS)/mlx/bin/pip install 'mlx[cpu]' mlx-lm
	touch $@

clean:
	rm -rf .venv $(PEERS) build .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis
