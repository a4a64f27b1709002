# Two commands on a machine that has only Python: `make demo` and `make test`.
PYTHON ?= python3
PIP_FLAGS ?= --quiet --disable-pip-version-check
PYTEST_FLAGS ?= -n 2

.PHONY: demo test lint clean

demo: .venv/demo
	.venv/bin/condense compare

test: .venv/dev .venv-oldest/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest $(PYTEST_FLAGS)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 .venv/bin/python -m pytest $(PYTEST_FLAGS) tests/triton_kernels
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest $(PYTEST_FLAGS) tests/models tests/caches

lint: .venv/dev
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .
	.venv/bin/mypy

.PHONY: docs
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build

clean:
	rm -rf .venv .venv-oldest build dist site

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo: .venv/bin/python pyproject.toml constraints.txt
	.venv/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt torch
	.venv/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[plot]'
	touch $@

.venv/dev: .venv/bin/python pyproject.toml constraints.txt
	.venv/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt torch
	.venv/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	touch $@

.venv/docs: .venv/bin/python pyproject.toml constraints.txt
	.venv/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt torch
	.venv/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[docs]'
	touch $@

# the oldest transformers we support, layered over the packages of .venv
.venv-oldest/dev: .venv/dev constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv/bin/python -c "import site; print(site.getsitepackages()[0])" \
	  > "$$(.venv-oldest/bin/python -c 'import site; print(site.getsitepackages()[0])')/newest.pth"
	.venv-oldest/bin/python -m pip install $(PIP_FLAGS) -r constraints-oldest.txt
	.venv-oldest/bin/python -m pip install $(PIP_FLAGS) --no-deps -e .
	touch $@
