# Two commands on a fresh machine: `make demo`, `make test`. PYTHON picks the interpreter (3.11 to 3.13).
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo venv test test-slow test-all test-rounding lint docs bench clean

demo: venv
	$(BIN)/fedlgm simulate digits

venv: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed -c constraints.txt -e '.[all]'
	touch $@

.venv/installed-test: .venv/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	touch $@

# Where it is set, each process that a test starts compiles all modules again.
export PYTHONDONTWRITEBYTECODE :=

# A file is one worker's, since its tests share runs; tests/conftest.py puts the long files first.
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

test: .venv/installed-test
	$(PYTEST) -n 2

# Most slow tests wait for other processes; a third worker uses that time.
test-slow: .venv/installed-test
	$(PYTEST) -n 3 -m 'slow and not gpu'

test-all: test test-slow

# Rounding depends on instruction set, threads and OpenBLAS; results of tests must not. By default the tests that compare
# with a reference or with recorded bits; all of them: `make test-rounding TESTS=tests`.
TESTS ?= $(addprefix tests/fedlgm/,aggregation mechanisms noise papers training) \
	$(addprefix tests/simulations/,test_adapters.py test_bits.py test_huggingface.py engines runs) tests/strategies
test-rounding: .venv/installed-test
	for capability in default avx2 avx512; do for threads in 1 2; do for blas in "" Haswell; do \
	    echo "$$capability, $$threads threads, OPENBLAS_CORETYPE=$$blas"; \
	    env -u OPENBLAS_CORETYPE ATEN_CPU_CAPABILITY=$$capability FEDLGM_TEST_THREADS=$$threads \
	        $${blas:+OPENBLAS_CORETYPE=$$blas} $(PYTEST) -n 2 -q $(TESTS) || exit 1; \
	done; done; done

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/installed-test
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: .venv/installed-test
	$(BIN)/python -m benchmarks.simulators --quick --json

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
