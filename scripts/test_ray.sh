#!/usr/bin/env bash
# The tests on a Ray cluster of three nodes on this machine, in an environment laid over .venv: build/ray, made once
# (a minute, 400 MB). Arguments go to pytest: make test-ray ARGS="-k kill".
#
#   SPECRAG_RAY_PYTHON=FILE   use the Python of another environment, which has specrag's packages and Ray
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly ENVIRONMENT=$PWD/build/ray
readonly PYTHON="${SPECRAG_RAY_PYTHON:-$ENVIRONMENT/bin/python}"

say() { printf 'test-ray: %s\n' "$*" >&2; }

# What .venv has is seen through it, so that only Ray itself is fetched.
make_environment() {
    say "making $ENVIRONMENT with Ray; this takes a minute the first time"
    rm -rf "$ENVIRONMENT"
    .venv/bin/python -m venv "$ENVIRONMENT"
    local packages
    packages=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$packages/specrag-packages.pth"
    "$PYTHON" -m pip --disable-pip-version-check --no-input install --quiet "$(
        .venv/bin/python -c 'import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["ray"])'
    )"
}

main() {
    "$PYTHON" -c 'import ray.serve' 2>/dev/null || make_environment
    export SPECRAG_HOME="${SPECRAG_TEST_HOME:-$HOME/.cache/specrag-tests}" PYTHONPATH="$PWD/src:$PWD"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # every replica is a process of its own
    "$PYTHON" -m specrag models pull smollm2-135m
    exec "$PYTHON" -m pytest tests/integrations/ray -n0 "$@"
}

main "$@" </dev/null
