# make demo | test | test-fast | mutate | lint | bench: each does its own set-up in .venv, with the versions pinned in
# constraints.txt.
PYTHON ?= python3
RUN := .venv/bin

.PHONY: demo test test-fast mutate lint bench clean

demo: .venv/ready
	$(RUN)/rope-ext demo

test: .venv/ready
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n 2 --dist loadscope

test-fast: .venv/ready
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n 2 --dist loadscope -m "not slow"

# An hour or more: mutates the pure modules, see tests/mutate.py. MUTATE="--sample 20 eval/protocols.py" for less.
mutate: .venv/ready
	$(RUN)/pip install -q -c constraints.txt cosmic-ray==8.7.0
	$(RUN)/python tests/mutate.py $(MUTATE)

lint: .venv/ready
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

bench: .venv/ready
	$(RUN)/python benchmarks/overhead.py

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(RUN)/pip install -q -c constraints.txt torch==2.13.0
	$(RUN)/pip install -q -c constraints.txt -e '.[eval,dev]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
