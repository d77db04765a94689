#!/usr/bin/env bash
# The tests, the same here and in CI. Arguments go to pytest: make test ARGS="tests/core -k sampling".
# Models are kept outside the checkout, so that a fresh clone does not fetch them again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export SPECRAG_HOME="${SPECRAG_TEST_HOME:-$HOME/.cache/specrag-tests}"
.venv/bin/specrag models pull smollm2-135m </dev/null
exec .venv/bin/python -m pytest "$@" </dev/null
