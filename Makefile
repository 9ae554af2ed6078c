# The commands for working with this repository; `make help` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
NATIVE  = $(shell git ls-files '*.cpp' '*.h')

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-all lint format docs bench gpu-check mutations fuzz random-steps train-demo train-draft reference kill-storm hostile test-clients check-wheel clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -q -c constraints.txt -e '.[cpu,demo]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.installed

# A wheel contains compiled kernels; a checkout compiles them once, before its first start.
$(VENV)/.kernels: $(VENV)/.installed $(shell find core plugins -name '*.cpp' -o -name '*.h')
	$(BIN)/graftlm warmup --model demo
	@touch $@

demo: $(VENV)/.kernels  ## serve the bundled model and ask it questions with the openai package
	$(BIN)/python examples/demo.py

serve: $(VENV)/.installed  ## serve a model: make serve CONFIG=engine.yaml; without, the bundled one
	$(BIN)/graftlm serve $(CONFIG)

# Tests start hundreds of processes, so Python must write its bytecode files: then each module is compiled only once.
test test-all: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.installed-dev  ## run the quick set of the tests: CPU only, no network; ARGS="tests/memory" or "-k radix"
	$(BIN)/python -m pytest -m 'not gpu' -n auto --maxprocesses 8 --dist worksteal $(ARGS)

# No test of the quick set may exceed --most-cpu-s. The limit is in CPU time, because wall time depends on other load.
test-all: $(VENV)/.installed-dev  ## run all tests: full products and minutes-long scripts too, as CI does
	$(BIN)/python -m pytest --full --most-cpu-s 30 --durations 20 -m 'not gpu' -n auto --maxprocesses 8 --dist worksteal $(ARGS)

lint: $(VENV)/.installed-dev  ## ruff, clang-format, mypy --strict, import direction, conflict markers, test files without tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_sources.py

format: $(VENV)/.installed-dev  ## rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

reference: $(VENV)/.installed-dev  ## write what docs/ has from the code: the reference, the families' contracts
	PYTHONPATH=tools $(BIN)/python -m docs_reference

docs: $(VENV)/.installed-dev  ## build the docs site into site/; it needs no network, to build or to view
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(VENV)/.installed-dev  ## the offline benchmark on the bundled model, and what the server adds to it
	$(BIN)/graftlm bench offline --json benchmarks/results/offline-demo.json
	$(BIN)/python benchmarks/server_overhead.py

gpu-check: $(VENV)/.installed-dev  ## tests and measurements on a CUDA device; ARGS="--shape 1b --budget-s 300"
	$(BIN)/python benchmarks/gpu_check.py $(ARGS)

mutations: $(VENV)/.installed-dev  ## change the code as tests/mutations lists; a test must fail each time; ARGS="-k kv_codes"
	$(BIN)/python tools/mutate.py $(ARGS)

fuzz: $(VENV)/.installed-dev  ## 5,000 requests made from the server's OpenAPI document
	$(BIN)/python tests/server/fuzz.py $(ARGS)

random-steps: $(VENV)/.installed-dev  ## 2,000,000 scheduler steps over a fake device, every page checked after each
	$(BIN)/python tests/scheduling/random_steps.py $(ARGS)

kill-storm: $(VENV)/.installed-dev  ## kill a server's processes 200 times under mixed traffic; ARGS="--minutes 60 --kill-every-s 60"
	$(BIN)/python tests/server/kill_storm.py $(ARGS)

hostile: $(VENV)/.installed-dev  ## attacks on a server without a key, and what they cost a normal client; some minutes
	$(BIN)/python tests/server/hostile_clients.py $(ARGS)

# SGLang is installed without its dependencies, which include CUDA, but with the packages that its frontend imports.
build/clients/sglang/.installed build/clients/sglang_bench/.installed: | $(BIN)/python
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --no-deps sglang==0.5.23
	$(@D)/bin/python -m pip install -q -c constraints.txt aiohttp ipython msgspec numpy orjson packaging pillow pybase64 pydantic \
		pyzmq requests starlette torch tqdm triton $(MORE)
	@touch $@
build/clients/sglang_bench/.installed: MORE = apache-tvm-ffi compressed-tensors datasets gguf sentencepiece transformers zstandard

# Debian's package has prometheus and promtool. It is unpacked, not installed.
build/clients/prometheus/.installed:
	mkdir -p build/clients/prometheus
	cd build/clients/prometheus && apt-get download -q prometheus && dpkg -x prometheus_*.deb .
	@touch $@

# The first line of a client's requirements is the client itself. PyPI's wheels in REMOVED need PyTorch for CUDA; vLLM's
# import fails with them, and does not need them.
build/clients/%/.installed: tests/clients/requirements/%.txt | $(BIN)/python
	$(PYTHON) -m venv build/clients/$*
	build/clients/$*/bin/python -m pip install -q --disable-pip-version-check -r $<
	$(if $(REMOVED),build/clients/$*/bin/python -m pip uninstall -q -y $(REMOVED))
	@touch $@
build/clients/vllm_bench/.installed: REMOVED = torchvision torchaudio torchcodec

# Not in the list: `prometheus` needs Debian, and `vllm_bench` is a large download.
CLIENTS ?= sglang openai anthropic litellm langchain pydantic_ai instructor openai_agents llama_index guidance outlines dspy sglang_router smg \
	guidellm aiperf sglang_bench phoenix
test-clients: $(VENV)/.installed-dev $(CLIENTS:%=build/clients/%/.installed)  ## run other projects' clients against a server; CLIENTS="openai anthropic"
	$(BIN)/python tests/clients/run.py $(CLIENTS)

check-wheel: $(VENV)/.installed-dev  ## build the wheel, install it, run it without a compiler; ARGS="--rounds 0"
	$(BIN)/python tools/check_wheel.py $(ARGS)

train-demo: $(VENV)/.installed-dev  ## train the bundled model again, into build/demo
	$(BIN)/python -m graftlm.demo.train --out build/demo

train-draft: $(VENV)/.installed-dev  ## train the bundled model's EAGLE-3 head again, into build/eagle3, and measure it
	$(BIN)/python -m graftlm.demo.train_draft --out build/eagle3
	$(BIN)/python benchmarks/draft_head.py --head build/eagle3

clean:  ## remove the environment and all caches
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
