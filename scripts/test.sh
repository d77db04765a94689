#!/usr/bin/env bash
# The tests, the same here and in CI. Arguments go to pytest: make test ARGS="tests/core -k sampling".
# Models are kept outside the checkout, so that a fresh clone does not fetch them again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export SPECRAG_HOME="${SPECRAG_TEST_HOME:-$HOME/.cache/specrag-tests}"
scripts/install_browser.sh
.venv/bin/specrag models pull smollm2-135m </dev/null
# Two processes of one thread each: torch's threads are of little use to small tests, and two processes of two threads
# on two cores would wait for one another.
export OMP_NUM_THREADS=1
# A file stays in one process: servers and models that its tests share are started once.
exec .venv/bin/python -m pytest -n 2 --dist loadfile "$@" </dev/null
