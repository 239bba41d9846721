# Two commands do everything on a fresh Linux machine with Python >= 3.11 and a C++ compiler:
#   make demo    train a small transformer on real text under four strategies
#   make test    lint, types and the test suite, under ten minutes on two cores

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FRAMEWORKS := $(VENV)/.frameworks
DOCS := build/docs-env
# Where bytecode is not kept, each process compiles all of torch anew, for ten to twenty seconds.
unexport PYTHONDONTWRITEBYTECODE
# Two processes for two cores, of one thread each.
PYTEST := -m pytest -n 2 --dist worksteal

.PHONY: demo test quick test-all test-torch test-nightly test-cuda-emulated canary tested-version fuzz suites \
	lint docs lint-workflows release committed bench bench-peers gpu gpu-here gpu-prepared gpu-emulated a-gpu \
	coverage engine-times evidence clean

demo: $(READY)
	$(BIN)/python examples/train_bytes.py

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m "not slow"

# While you work on the compiler: the first two tests of each file on passes and runtime, interpreted,
# in under a minute. `test` has the others.
quick: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m "not slow and not kernels" --few 2 \
		tests/passes tests/runtime

# All tests, and by the kernels that Inductor compiles, where `test` interprets graphs.
test-all: lint $(FRAMEWORKS) $(DOCS)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) --compiler

# Random optimizer programs of fresh seeds; a program that fails is printed as a short script.
#   make fuzz SECONDS=600        make fuzz PROGRAMS=2000 SEED=7
fuzz: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/fuzz.py $(if $(SECONDS),--seconds $(SECONDS)) \
		$(if $(PROGRAMS),--programs $(PROGRAMS)) $(if $(SEED),--seed $(SEED)) \
		$(if $(WAYS),--ways $(WAYS))

# Tests of other optimizer packages, as they are and with every step compiled: none may fail for it. Their
# sources, in build/suites, are those of requirements-suites.txt; an hour or two on two cores.
#   make suites ONLY=timm        make suites ARGS="--steps kernels"
suites: $(READY)
	$(BIN)/python tests/support/suites.py $(if $(ONLY),--only $(ONLY)) $(ARGS)

# $(call install,ENVIRONMENT,ARGUMENTS): says nothing, or what pip has said last. With --quiet pip does
# not tell which requirements, or constraints, conflict.
install = $(1)/bin/python -m pip install $(2) > $(1)/pip.log 2>&1 || \
	{ tail -n 15 $(1)/pip.log; echo "all of it is in $(1)/pip.log"; exit 1; }

# The tests under another torch that is supported: make test-torch VERSION=2.15.0, in an environment of
# its own.
TORCH := build/torch-$(VERSION)

test-torch: $(TORCH)/.ready
	OMP_NUM_THREADS=1 $(TORCH)/bin/python $(PYTEST) -m "not slow"

$(TORCH)/.ready: requirements-torch.txt pyproject.toml | tested-version
	$(PYTHON) -m venv $(TORCH)
	VERSION=$(VERSION) $(call install,$(TORCH),--requirement $<)
	$(call install,$(TORCH),--no-build-isolation --editable .)
	touch $@

# The tests under a torch that nobody has tested: the newest pre-release that pip finds, of the index in
# PIP_EXTRA_INDEX_URL say.
NIGHTLY := build/torch-nightly
NIGHTLY_TORCH := --pre torch

test-nightly:
	$(PYTHON) -m venv --clear $(NIGHTLY)
	$(NIGHTLY)/bin/python -m pip install --quiet $(NIGHTLY_TORCH)
	sed /^torch==/d requirements-torch.txt >$(NIGHTLY)/requirements.txt
	$(NIGHTLY)/bin/python -m pip install --quiet --requirement $(NIGHTLY)/requirements.txt
	$(NIGHTLY)/bin/python -m pip install --quiet --no-build-isolation --editable .
	OMP_NUM_THREADS=1 $(NIGHTLY)/bin/python $(PYTEST) -m "not slow" \
		--deselect tests/runtime/test_torch_versions.py::test_the_torch_of_this_environment_is_tested

# What becomes of collage_fx in a torch that lacks one of the private names that it uses, each in turn.
canary: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/canary.py

tested-version:
	@tested="$$($(PYTHON) runtime/torch_versions.py)"; \
	case " $$tested " in *" $(VERSION) "*) ;; *) echo "make test-torch: VERSION='$(VERSION)' is" \
		"none of the versions that were tested: $$tested (runtime/torch_versions.py)"; exit 1;; esac

# The host's part of GPU code (launches, copies, captures) on an emulated device, without a GPU: the
# CUDA wheel of torch in an environment of its own, some 5 GB. tests/support/cuda_emulator. ALL=1 runs
# every part of the GPU check too, for a quarter of an hour.
EMULATED := build/cuda-emulated

test-cuda-emulated: $(EMULATED)/.ready
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(EMULATED)/bin/python -m cuda_emulator \
		python -m pytest tests/emulated $(if $(ALL),,-m "not slow")

$(EMULATED)/.ready: requirements-cuda.txt pyproject.toml
	$(PYTHON) -m venv $(EMULATED)
	$(EMULATED)/bin/python -m pip install --quiet --requirement $<
	$(EMULATED)/bin/python -m pip install --quiet --no-build-isolation --editable .
	touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	# passes/ and runtime/ are installed inside collage_fx; mypy sees them where they will be.
	rm -rf build/typed && mkdir -p build/typed && cp -r collage_fx build/typed
	cp -r passes runtime build/typed/collage_fx
	cd build/typed && ../../$(BIN)/mypy --num-workers 2 --config-file ../../pyproject.toml \
		--package collage_fx

# The site, in build/docs-site; what would be a warning is an error. `make docs SERVE=1` shows it while pages
# are written.
docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs $(if $(SERVE),serve,build --strict)

$(DOCS)/.ready: requirements-docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(call install,$(DOCS),--requirement $<)
	touch $@

# Tools that are no part of what is tested.
TOOLS := build/tools

# .github by the schemas of such files; tests/project/test_workflows.py and test_community.py by what is
# in the tree.
SCHEMA = $(TOOLS)/bin/check-jsonschema --builtin-schema
FORMS := .github/ISSUE_TEMPLATE

lint-workflows: $(TOOLS)/.ready
	$(SCHEMA) vendor.github-workflows .github/workflows/*.yml
	$(SCHEMA) vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard $(FORMS)/*.yml))
	$(SCHEMA) vendor.github-issue-config $(FORMS)/config.yml

# The sdist, and the wheel built from it, in dist/; then a step with the wheel, installed beside nothing
# but what it asks for and the torch of requirements.txt. It prints how to tag, and tags nothing.
BARE := build/bare

release: committed $(TOOLS)/.ready
	rm -rf dist
	$(TOOLS)/bin/python -m build --no-isolation
	$(TOOLS)/bin/twine check --strict dist/*
	$(PYTHON) -m venv --clear $(BARE)
	$(BARE)/bin/python -m pip install --quiet dist/*.whl "$$(grep ^torch== requirements.txt)"
	cd / && $(CURDIR)/$(BARE)/bin/python -I $(CURDIR)/tests/support/release_step.py
	$(TOOLS)/bin/python tests/support/release.py dist

committed:
	@test -z "$$(git status --porcelain --untracked-files=no)" || \
		{ echo "make release: there are changes that are not committed"; exit 1; }

$(TOOLS)/.ready: requirements-tools.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --requirement $<
	touch $@

bench: $(READY)
	$(BIN)/python benchmarks/replay.py
	$(BIN)/python benchmarks/compile_time.py

# Optimizers of others that step_time.py then measures too.
PEERS := benchmarks/peers-requirements.txt

bench-peers: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --requirement $(PEERS)

# The studies of docs/evidence.md: runs that are not there yet, two at a time, then tables and plots of all; two to
# three hours on two cores. QUICK=1 takes a quarter of an hour and writes to build/studies/quick. Three files of other
# packages are downloaded first; a study whose file cannot be had is skipped. DEVICE=cuda trains a larger model.
#   make evidence ONLY=tune        make evidence DEVICE=cuda
evidence: $(READY)
	$(BIN)/python benchmarks/studies/data.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/studies/run.py --jobs 2 $(if $(QUICK),--quick) \
		$(if $(ONLY),--only "$(ONLY)") $(if $(DEVICE),--device $(DEVICE))
	$(BIN)/python benchmarks/studies/analyse.py $(if $(QUICK),--quick) $(if $(DEVICE),--gpu)

# All that needs a GPU: tests of bits and of CUDA graphs, then time, memory and a training run.
gpu: a-gpu $(READY)
	$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit( \
		"make gpu: torch " + torch.__version__ + " finds no CUDA device here")'
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python benchmarks/step_time.py --device cuda
	$(BIN)/python benchmarks/memory.py --device cuda
	$(BIN)/python benchmarks/train_gpt.py --device cuda

# What a GPU has to show, in runs of five to ten minutes, with the Python that is there: it needs torch,
# triton, numpy and pytest, and asks no network. What the two targets below leave in build/ is used.
#   make gpu-here RUN=A        make gpu-here RUN=B ARGS="--commit 85bc725"
#   make gpu-here ARGS=--dry   for the CPU
CHECK = benchmarks/gpu_check.py $(if $(RUN),--run $(RUN)) $(ARGS)

gpu-here:
	$(PYTHON) $(CHECK)

# What is carried to the machine with the GPU beside the checkout: the expected words, by its version
# of torch, and the peers' wheels.
gpu-prepared: $(EMULATED)/.ready
	$(EMULATED)/bin/python benchmarks/gpu_words.py --out build/gpu_words.pt
	$(EMULATED)/bin/python -m pip download --quiet --no-deps --dest build/wheels --requirement $(PEERS)

# The same check on the emulated device; it leaves compiled kernels in build/gpu_cache.
#   make gpu-emulated RUN=A
gpu-emulated: $(EMULATED)/.ready
	CUDA_EMULATOR_ZEROS=1 PYTHONPATH=tests/support $(EMULATED)/bin/python -m cuda_emulator \
		python $(CHECK) --out build/gpu_emulated$(RUN).json

# Before anything is installed.
a-gpu:
	@ls /dev/nvidia* /dev/kfd /dev/dxg 2>/dev/null | grep -q . || \
		{ echo "make gpu: this machine has no GPU (no device of NVIDIA or AMD in /dev)"; exit 1; }

# Optimizers of other packages, in an environment of their own; an hour or two on two cores.
coverage: build/coverage/.ready
	build/coverage/bin/python -W ignore benchmarks/coverage.py

# How long their steps take beside plain eager ones; some five hours on one core.
#   make engine-times ARGS="--engine joined --missing"
engine-times: build/coverage/.ready
	build/coverage/bin/python -W ignore benchmarks/engine_times.py $(ARGS)

build/coverage/.ready: requirements.txt benchmarks/coverage-requirements.txt
	$(PYTHON) -m venv build/coverage
	build/coverage/bin/python -m pip install --quiet --requirement requirements.txt
	build/coverage/bin/python -m pip install --quiet --no-deps \
		--requirement benchmarks/coverage-requirements.txt
	build/coverage/bin/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

# Modules are compiled where they are first imported: of 13000 that are installed, few are.
$(READY): requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable .
	touch $(READY)

$(FRAMEWORKS): requirements-frameworks.txt $(READY)
	$(BIN)/python -m pip install --quiet --requirement $<
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
