#!/usr/bin/env bash
# The tests, the same here and in CI. Arguments go to pytest: make test ARGS="tests/engine -k sampling".
# With --fast, those that need neither a model nor a browser.
# Models are kept outside the checkout, so that a fresh clone does not fetch them again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export SPECRAG_HOME="${SPECRAG_TEST_HOME:-$HOME/.cache/specrag-tests}"
if [[ " $* " != *" --fast "* ]]; then
    scripts/install_browser.sh
    .venv/bin/specrag models pull smollm2-135m </dev/null
fi
# Two processes of one thread each: torch's threads are of little use to small tests, and two processes of two threads
# on two cores would wait for one another.
export OMP_NUM_THREADS=1
# Each process takes half of the files, and from the other's end when it is done: what the tests of a file share, such as
# a server, is started once as a rule.
exec .venv/bin/python -m pytest -n 2 --dist worksteal "$@" </dev/null
