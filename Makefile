# What most people type; each target does its own set-up in .venv, with the versions pinned in constraints.txt.
# Other releases of transformers, engines, exporters and compilers: .venv/bin/nox -l
PYTHON ?= python3
RUN := .venv/bin
DEVICE ?= cpu
# Processes that run tests, each on one thread and with some gigabytes of memory.
WORKERS ?= $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 8 ? cores : 8)))
PYTEST = OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n $(WORKERS) --dist loadscope

.PHONY: demo test test-library test-slow test-thorough lint docs figures bench real-models gpu dist check-dist check-tag clean

# Four methods on the small model that comes with the package.
demo: .venv/ready
	$(RUN)/rope-ext demo

# Without the modules that pytest compiles, kept beside the tests, each run would compile 150 of them anew.
test test-library test-slow test-thorough: export PYTHONDONTWRITEBYTECODE =

# What to run before you send a change: all fast tests; under eight minutes on two cores.
test: .venv/ready
	$(PYTEST) -m "not slow" --durations=10 --durations-min=1

# What to run while you change the library: its fast tests and those of the pages; some minutes.
LIBRARY := attention checkpoints cli eval files methods models patches pictures reading rotary runs test_docs.py
test-library: .venv/ready
	$(PYTEST) -m "not slow" $(LIBRARY:%=tests/%)

# What CI runs beside `make test`: processes killed, browsers, compilers, other families.
test-slow: .venv/ready
	$(PYTEST) -m "slow and not thorough"

# What tests/support/tiers.py leaves to it, on all families; most of an hour, before a release.
test-thorough: .venv/ready
	$(PYTEST) -m thorough

lint: .venv/ready
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/python -m checks.plain_english

# The site, into build/site; fails if a figure is out of date.
docs: .venv/docs-ready
	$(RUN)/python -m docs.make_figures --check
	$(RUN)/mkdocs build --strict

# Every number of README.md and the pages, from benchmarks/results.jsonl and docs/results.
figures: .venv/ready
	$(RUN)/python -m docs.make_figures

# Some hours: every benchmark, see benchmarks/bench.py. DEVICE=cuda measures a GPU.
bench: .venv/ready
	$(RUN)/nox -s bench -- --device $(DEVICE)

# Twenty minutes, or MINUTES=: a real model beyond its context length, see benchmarks/real_models.py. MODEL=, DATA=.
real-models: .venv/ready
	$(RUN)/python benchmarks/real_models.py --device $(DEVICE) $(if $(MODEL),--model "$(MODEL)") \
		$(if $(DATA),--data "$(DATA)") $(if $(MINUTES),--minutes $(MINUTES)) $(REAL_MODELS)
	$(RUN)/python -m docs.make_figures

# Less than nine minutes, on one GPU: a real model (MODEL=, TEXTS=), an 8B's speed, kernels, tests, into docs/gpu.md. Without
# an installation, from any checkout: python benchmarks/gpu.py
gpu: .venv/ready
	$(RUN)/python benchmarks/gpu.py --out docs/results $(if $(MODEL),--model "$(MODEL)") \
		$(if $(TEXTS),--texts "$(TEXTS)"); status=$$?; $(RUN)/python -m docs.make_figures && exit $$status

.venv/ready: pyproject.toml constraints.txt checks/install_torch.py
	$(PYTHON) -m venv .venv
	$(RUN)/python checks/install_torch.py -c constraints.txt torch
	$(RUN)/pip install -q -c constraints.txt -e '.[eval,dev]'
	touch $@

.venv/docs-ready: .venv/ready
	$(RUN)/pip install -q -c constraints.txt -e '.[docs]'
	touch $@

# The wheel and the source archive, into dist/.
dist: build/packaging/ready
	rm -rf dist
	build/packaging/bin/python -m build

# What dist/ holds, as a package index reads it, and the wheel in an environment of its own, with the demo outside the tree.
check-dist: build/packaging/ready
	build/packaging/bin/twine check --strict dist/*
	rm -rf build/installed
	$(PYTHON) -m venv build/installed
	build/installed/bin/python checks/install_torch.py -c constraints.txt torch
	build/installed/bin/pip install -q -c constraints.txt "$$(echo dist/*.whl)[eval]"
	cd build/installed && bin/rope-ext demo --out demo
	test -s build/installed/demo/demo.png

build/packaging/ready: Makefile
	$(PYTHON) -m venv build/packaging
	build/packaging/bin/pip install -q build==1.6.1 twine==7.0.0
	touch $@

# Before a release: TAG=v0.1.0 is the version, which stands in rope_ext_hf/__init__.py, and CHANGELOG.md has its date.
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"$$/\1/p' rope_ext_hf/__init__.py)
check-tag:
	@test "$(TAG)" = "v$(VERSION)" || \
		{ echo "the tag is '$(TAG)' and the version $(VERSION): tag v$(VERSION), or change __version__"; exit 1; }
	@grep -Eq '^## $(VERSION) \([0-9]{4}-[0-9]{2}-[0-9]{2}\)$$' CHANGELOG.md || \
		{ echo "CHANGELOG.md has no heading '## $(VERSION) (YEAR-MONTH-DAY)': write the date of the release"; exit 1; }

clean:
	rm -rf .venv build dist *.egg-info
