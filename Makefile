# make demo: the digits recipe, from checkpoint to bundle.   make test: all tests.   Each sets up everything it needs.
# make page: of that bundle a page to draw digits on; needs Node 18 or newer, with npm.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# playwright drives Debian's Chromium: none of its own browsers is downloaded.
DEV    := pytest pytest-xdist hypothesis import-linter ruff mypy types-PyYAML scikit-learn hatchling model-signing pyopenssl tritonclient[http,grpc] fastapi opencv-python-headless playwright jsonschema
# The independent implementations that tests compare with. torchvision without what it depends on: its wheel for CUDA does
# where there is only a CPU build of PyTorch (tests/references.py).
REFERENCES := timm==1.0.31 transformers==5.23.0 torchmetrics einops

.PHONY: demo page test modules tensorrt-api models-doc report-schema clean

demo: $(VENV)/.installed
	$(BIN)/vitdeploy run recipes/digits.yaml -o out/digits

page: demo
	rm -rf out/page
	$(BIN)/vitdeploy embed out/digits --as web -o out/page
	cd out/page && npm ci --ignore-scripts && npm run build && npm test
	@echo 'next: cd out/page && npm start'

# The tests start many processes, which would all compile the package again where no bytecode is written. Three at once on two
# cores: some wait for servers and devices most of their time.
test: $(VENV)/.installed-dev tensorrt-api
	$(BIN)/ruff check .
	$(BIN)/ruff format --check vitdeploy
	$(BIN)/mypy
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

# Modules as people write them, three blocks deep in place of one, and each by the commands to a bundle.
modules: $(VENV)/.installed-dev
	VITDEPLOY_TEST_DEPTH=3 $(BIN)/python -m pytest -q tests/compatibility/test_modules.py tests/compatibility/test_modules_as_bundles.py

# The real Python APIs of TensorRT and of CUDA, which our calls are checked against. What cannot be made is told, and its
# tests skip; what was made is kept.
tensorrt-api: $(VENV)/.installed-dev
	$(BIN)/python tests/tensorrt_api/make_stubs.py $(VENV)/tensorrt-api

# docs/models.md, of what the tests of parity measure.
models-doc: $(VENV)/.installed-dev
	$(BIN)/python -m tests.models_page -n 2 --dist loadfile

# docs/report.schema.json, of the dataclasses that report.json is written by.
report-schema: $(VENV)/.installed-dev
	$(BIN)/python -m tests.report_schema

# The stamp is written last, so that an interrupted installation is done again.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "vitdeploy needs Python 3.10 or newer; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[all]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps torchvision==0.28.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(DEV) $(REFERENCES)
	touch $@

clean:
	rm -rf $(VENV) out build dist
