# make demo: the digits recipe, from checkpoint to bundle.   make test: all tests.   Each sets up everything it needs.
# make page: of that bundle a page to draw digits on, after a demo where there is none; needs Node 18 or newer, with npm.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet
COMPILE := build/lock/bin/uv pip compile --quiet pyproject.toml --constraint requirements/torch.txt --no-python-downloads
.PHONY: demo page test test-lowest test-extras test-pythons docs modules tensorrt-api mlflow-server models-doc arm64 faults faults-all \
	scale sbom audit report-schema train-scenes lock clean

demo: $(VENV)/.installed
	$(BIN)/vitdeploy run recipes/digits.yaml -o out/digits

out/digits/manifest.json: | $(VENV)/.installed
	$(BIN)/vitdeploy run recipes/digits.yaml -o out/digits

page: out/digits/manifest.json
	rm -rf out/page
	$(BIN)/vitdeploy embed out/digits --as web -o out/page
	cd out/page && npm ci --ignore-scripts && npm run build && npm test
	@echo 'next: cd out/page && npm start'

# The tests start many processes, which would all compile the package again where no bytecode is written. Four at once on two
# cores: some wait for servers and devices most of their time. A test process that dies ends the run: xdist would start another,
# and wait for ever in the end.
test: $(VENV)/.installed-dev tensorrt-api
	$(BIN)/ruff check .
	$(BIN)/ruff format --check vitdeploy
	$(BIN)/mypy
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# make test-runtime: the tests of one package, except those that take half a minute or more.
test-%: $(VENV)/.installed-dev
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m 'not slow' tests/$*

# The reference of docstrings, and the pages of docs/: out/docs/index.html. A warning is an error.
docs: $(VENV)/.installed-dev
	$(BIN)/python -m sphinx -q -W --keep-going -d build/doctrees docs out/docs

# Modules as people write them, three blocks deep in place of one, and each by the commands to a bundle.
modules: $(VENV)/.installed-dev
	VITDEPLOY_TEST_DEPTH=3 $(BIN)/python -m pytest -q tests/compatibility/test_modules.py tests/compatibility/test_modules_as_bundles.py tests/compatibility/test_graphs.py

# The real Python APIs of TensorRT and of CUDA, which our calls are checked against. Stubs that cannot be made are
# listed, and their tests skip; the others are kept.
tensorrt-api: $(VENV)/.installed-dev
	$(BIN)/python tests/tensorrt_api/make_stubs.py $(VENV)/tensorrt-api

# MLflow with its server, which tests of `--report-to` start; in an environment of its own, as it wants an older pyarrow.
mlflow-server: build/mlflow/.installed

build/mlflow/.installed:
	$(PYTHON) -m venv --clear build/mlflow
	build/mlflow/bin/python -m pip install --quiet 'mlflow==3.*'
	touch $@

# docs/models.md, of what the tests of parity measure.
models-doc: $(VENV)/.installed-dev
	$(BIN)/python -m tests.models_page -n 2 --dist loadfile

# The device zone on emulated arm64 boards; needs root on Linux x86-64 with Debian's apt. The form of .ci/run: SHORT=--short.
arm64: $(VENV)/.installed-dev
	$(BIN)/python -m tests.arm64 $(SHORT)

# The reliability gate: malformed files, kills, full disks, contention, flipped bits, long runs, hostile devices; in a
# minute and a half on two cores, and whole in some hours. One table, and build/faults/faults.json (docs/results/reliability.md). In pieces:
# python -m tests.faults --all --only FIGURE.
faults: $(VENV)/.installed-dev
	$(BIN)/python -m tests.faults

faults-all: $(VENV)/.installed-dev
	$(BIN)/python -m tests.faults --all

# Past one machine: shards, executors, kills, grids, a history, a fleet; in some two minutes on two cores. One table, and
# build/scale/scale.json (docs/scale.md). Single rows: python -m tests.scale --only ROW; at the sizes of that page: --all.
scale: $(VENV)/.installed-dev
	$(BIN)/python -m tests.scale

# What a device install holds, as CycloneDX: out/sbom.json. And which of the locked versions are known to be vulnerable, where the
# registry answers that.
sbom: build/audit/.installed
	$(PYTHON) -m venv --clear build/device
	build/device/bin/python -m pip install --quiet '.[onnxruntime,openvino,serve]'
	mkdir -p out
	build/audit/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o out/sbom.json build/device/bin/python

audit: build/audit/.installed
	build/audit/bin/pip-audit --strict --disable-pip --requirement requirements/all.txt

build/audit/.installed:
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet cyclonedx-bom==7.* pip-audit==2.*
	touch $@

# The models of drawn scenes, calibration/scenes/models/: about two hours on a quiet core; last bits differ from the committed ones.
train-scenes: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m calibration.scenes train all

# docs/report.schema.json, of the dataclasses that report.json is written by.
report-schema: $(VENV)/.installed-dev
	$(BIN)/python -m tests.report_schema

# The device zone with the lowest versions that pyproject.toml allows, and the lowest Python that starts. Tests that need
# PyTorch skip, as its lowest version has a CPU build on few indexes; with one, `make test-lowest LOWEST_TORCH=2.10.0` runs
# them, and the pipeline.
LOWEST_PYTHON ?= $(shell for each in python3.10 python3.11 python3; do $$each -c '' 2>/dev/null && echo $$each && break; done)
test-lowest: build/lowest$(LOWEST_TORCH)/.installed
	PYTHONDONTWRITEBYTECODE= $(<D)/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m 'not slow' \
	  $(addprefix tests/,runtime compilation benchmark bundle serve $(if $(LOWEST_TORCH),exporter/test_export.py pipeline search/test_mixed.py))

build/lowest$(LOWEST_TORCH)/.installed: requirements/lowest.txt
	$(LOWEST_PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --require-hashes --no-deps --requirement requirements/lowest.txt
	$(if $(LOWEST_TORCH),$(@D)/bin/python -m pip install --quiet torch==$(LOWEST_TORCH))
	touch $@

# Each extra, installed from the wheel into a clean environment; some minutes, and gigabytes of space for a while.
test-extras: $(VENV)/.installed-dev
	rm -rf dist
	$(BIN)/python -m hatchling build
	$(BIN)/python -m tests.extras dist/*.whl

# The wheel with each Python from 3.10 to 3.13 that this machine has; some ten minutes each.
test-pythons: $(VENV)/.installed-dev
	rm -rf dist
	$(BIN)/python -m hatchling build -t wheel
	$(BIN)/python -m tests.extras dist/*.whl --pythons

# The stamp is written last, so that an interrupted installation is done again. The lock files hold all but PyTorch, with what it
# depends on; so it finds that installed, and only itself is taken unhashed.
# The embedded images: 1,797 small files, from the one that the repository has.
calibration/digits/training: calibration/digits/images.tar.gz
	$(PYTHON) -m tarfile -e $< $(@D)
	touch $@

$(VENV)/.installed: pyproject.toml requirements/all.txt requirements/torch.txt | calibration/digits/training
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "vitdeploy needs Python 3.10 or newer; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --require-hashes --no-deps --requirement requirements/all.txt
	$(INSTALL) --constraint requirements/torch.txt torch
	$(INSTALL) --no-deps --no-build-isolation --editable .
	touch $@

# torchvision without what it depends on: its wheel for CUDA does where there is only a CPU build of PyTorch, once its
# operators are declared.
$(VENV)/.installed-dev: $(VENV)/.installed requirements/dev.txt
	$(INSTALL) --require-hashes --no-deps --requirement requirements/dev.txt
	$(INSTALL) --no-deps --constraint requirements/torch.txt torchvision
	$(BIN)/python tests/torchvision_operators.py
	touch $@

# The lock files, of pyproject.toml. Pins stay where they can; `make lock UPGRADE=--upgrade` takes the newest releases.
lock:
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet uv==0.13.9
	$(COMPILE) $(UPGRADE) --extra all --extra sign --extra ray --extra data --extra tracking --group dev --output-file requirements/dev.txt
	$(COMPILE) $(UPGRADE) --extra all --group build --constraint requirements/dev.txt --output-file requirements/all.txt
	$(COMPILE) --upgrade --resolution lowest-direct --extra all --group test --output-file requirements/lowest.txt

clean:
	rm -rf $(VENV) out build dist
