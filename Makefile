# Everything a checkout can do. Needed: Python 3.11 to 3.13 with its venv module, git, make.
# Each target makes .venv first if it is missing or older than the requirements.
#
#   make run                                ResNet-50 on real JPEGs, replicated on two devices
#   make run RUN_FLAGS='--batch_size=4'     the same with other flags
#   make test PYTEST_FLAGS='-k momentum'    a part of the tests

PYTHON ?= python3
RUN_FLAGS ?=
PYTEST_FLAGS ?=
GPU_FLAGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed
DALI := .venv/.dali
DALI_PLUGIN := nvidia-dali-tf-plugin-cuda120==2.4.0
SAMPLE := .data/sample

# What must agree before anything else is worth testing: every manager and all-reduce, and parity
# with the NumPy simulation.
FIRST := $(wildcard tests/variable_mgr tests/parity)
PYTEST := TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/python -m pytest -q $(PYTEST_FLAGS)

.PHONY: help run dali test test-all gpu-check nvidia-driver lint format lock clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

help:
	@echo 'make run       train ResNet-50 on sample photographs; more flags: RUN_FLAGS=...'
	@echo 'make dali      install NVIDIA DALI and its plugin for TensorFlow, 510 MB (960 on disk)'
	@echo 'make test      aggregation and parity first, then all other tests (installs DALI as well)'
	@echo 'make test-all  the same with the long tests (minutes, and a download of TensorFlow)'
	@echo 'make gpu-check  on a machine with GPUs: all that needs them, one report (gpu_check/)'
	@echo 'make lint      ruff (rules and format) on everything, mypy on hpm/'
	@echo 'make format    let ruff mend what it can'
	@echo 'make lock      pin for Bazel what .venv holds (requirements_lock.txt)'
	@echo 'make clean     remove .venv, the sample data and all build and cache files'

run: $(SAMPLE)/.complete
	@$(BIN)/python benchmarks/run.py --variable_update=replicated --data_dir=$(SAMPLE) \
	  --model=resnet50 --result_json=results/run.json $(RUN_FLAGS)

dali: $(DALI)

test: $(INSTALLED) $(DALI)
	@$(if $(FIRST),$(PYTEST) -x $(FIRST))
	@$(PYTEST) tests $(addprefix --ignore=,$(FIRST))

test-all: $(INSTALLED) $(DALI)
	@$(if $(FIRST),$(PYTEST) -m '' -x $(FIRST))
	@$(PYTEST) -m '' tests $(addprefix --ignore=,$(FIRST))

gpu-check: nvidia-driver $(INSTALLED)
	@$(BIN)/python -m benchmarks.gpu_check $(GPU_FLAGS)

# First, so that nothing is installed where it is of no use.
nvidia-driver:
	@test -e /proc/driver/nvidia || command -v nvidia-smi >/dev/null || { \
	  echo 'make: gpu-check needs a machine with at least one NVIDIA GPU, its driver, and TensorFlow' \
	    "with CUDA (.venv/bin/pip install -e '.[gpu]'): there is no NVIDIA driver here" >&2; exit 1; }

lint: $(INSTALLED)
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/mypy

# The pins that MODULE.bazel builds with: what .venv holds now, without DALI.
DALI_PACKAGES := nvidia-dali-cuda120 nvidia-dali-tf-plugin-cuda120 nvidia-libnvcomp-cu12 \
  nvidia-nvimgcodec-cu12 nvidia-nvjpeg-cu12 nvidia-nvjpeg2k-cu12 nvidia-nvtiff-cu12 nvtx makefun \
  libcst
lock: $(INSTALLED)
	@{ echo '# Written by `make lock`, read by MODULE.bazel; requirements belong into setup.py.'; \
	  $(BIN)/python -m pip list --format=freeze --disable-pip-version-check \
	    --exclude hpm --exclude pip $(DALI_PACKAGES:%=--exclude %); } > requirements_lock.txt

format: $(INSTALLED)
	@$(BIN)/ruff check --fix --quiet
	@$(BIN)/ruff format --quiet

clean:
	rm -rf .venv .data build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(SAMPLE)/.complete: | $(INSTALLED)
	@TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/python -m hpm.pipelines sample --out $(SAMPLE)
	@touch $@

$(INSTALLED): setup.py pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
	  echo 'make: $(PYTHON) not found: install Python 3.11, or say where it is:' \
	    'make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
	  echo "make: $(PYTHON) is $$($(PYTHON) -V 2>&1); TensorFlow 2.21 and hpm need 3.11, 3.12 or" \
	    '3.13: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo 'make: $(PYTHON) has no venv module: install it (Debian, Ubuntu: apt install' \
	    'python3-venv), or name another Python: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@echo "Installing hpm and its requirements (setup.py, with [test]) into .venv, $$($(PYTHON) -V);" \
	  'TensorFlow alone is a download of 600 MB ...'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[test]'
	@$(BIN)/python -m pip list --format=freeze --disable-pip-version-check | tr '\n' ' ' \
	  | fold -s -w 100; echo
	@echo "Installed: $$(ls -d .venv/lib/python*/site-packages/*.dist-info | wc -l) packages," \
	  "$$(du -sm .venv | cut -f 1) MiB in .venv"
	@touch $@

# The plugin comes as source that compiles against TensorFlow, with a library for TensorFlow 2.21
# beside it. Its installer takes that library if it loads within ten seconds, and otherwise wants a
# compiler and CUDA's headers; where that fails as well, the library is put where it belongs.
$(DALI): setup.py | $(INSTALLED)
	@echo 'Installing NVIDIA DALI into .venv, a download of 510 MB ...'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[test,dali]'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-build-isolation \
	  $(DALI_PLUGIN) >.venv/dali_plugin.log 2>&1 || { rm -rf .venv/dali_plugin; set -e; \
	  $(BIN)/python -m pip download -qq --disable-pip-version-check --no-deps --no-binary :all: \
	    --no-build-isolation -d .venv/dali_plugin $(DALI_PLUGIN); \
	  tar -xzf .venv/dali_plugin/*.tar.gz -C .venv/dali_plugin --strip-components=1; \
	  to=$$($(BIN)/python -c 'import nvidia.dali as d, os; print(os.path.dirname(d.__path__[0]))'); \
	  mkdir -p $$to/dali_tf_plugin; \
	  cp .venv/dali_plugin/nvidia/dali_tf_plugin/*.py .venv/dali_plugin/prebuilt/libdali_tf_2_21.so \
	    $$to/dali_tf_plugin; rm -rf .venv/dali_plugin; }
	@CUDA_VISIBLE_DEVICES=-1 TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/python -c \
	  'from nvidia.dali.plugin import tf; tf.experimental.DALIDatasetWithInputs' 2>.venv/dali.log || { \
	  tail -n 5 .venv/dali_plugin.log .venv/dali.log >&2; \
	  echo "make: DALI's plugin for TensorFlow does not load (above); everything but its tests works" \
	    'without it' >&2; exit 1; }
	@echo "Installed: DALI $$($(BIN)/python -c 'import nvidia.dali as d; print(d.__version__)')," \
	  "$$(du -sm .venv | cut -f 1) MiB in .venv"
	@touch $@
