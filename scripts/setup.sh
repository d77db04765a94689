#!/usr/bin/env bash
# Makes .venv and installs the package with its development tools, at the versions in constraints.txt.
# Does nothing, in well under a second, when pyproject.toml, constraints.txt and this script are unchanged.
#
#   PYTHON=python3.12 scripts/setup.sh    use another interpreter
#   SPECRAG_TORCH=cpu|default             choose torch's build instead of looking for a GPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv
readonly ORIGIN=$VENV/.specrag-origin # what the environment was made from; another origin makes a new one
readonly STAMP=$VENV/.specrag-setup   # what was installed into it; anything else is installed over it
readonly EXTRAS="local,serve,tracing,bench,train,stores,docs,dev"

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# The checkout's path counts, since an environment that was copied or moved is broken.
origin() { echo "$PWD ${PYTHON:-} ${SPECRAG_TORCH:-}"; }
contents() { { origin; cat pyproject.toml constraints.txt scripts/setup.sh; } | sha256sum | cut -d' ' -f1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "needs Python 3.11 or newer; install it, or name one with PYTHON=/path/to/python3"
}

# Debian's python3 comes without ensurepip, so that `python3 -m venv` alone may fail. The environment then
# gets its pip from the system's pip or, for root on Debian, from the package that is missing.
make_venv() {
    local python=$1
    rm -rf "$VENV"
    "$python" -m venv "$VENV" >/dev/null 2>&1 && return
    rm -rf "$VENV"
    if "$python" -m pip --version >/dev/null 2>&1; then
        say "this Python has no ensurepip; taking pip from the system's pip"
        "$python" -m venv --without-pip "$VENV"
        local site
        site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        "$python" -m pip install --quiet --target "$site" pip && return
    elif [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "this Python can make no virtual environment; installing Debian's python3-venv"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >/dev/null || true
        "$python" -m venv "$VENV" && return
    fi
    rm -rf "$VENV"
    die "this Python can make no virtual environment; run: sudo apt-get install python3-venv"
}

has_gpu() {
    [ -e /dev/nvidia0 ] || [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1
}

# Without a GPU the plain package would bring gigabytes of CUDA libraries that nothing can use.
install_torch() {
    local version build=${SPECRAG_TORCH:-}
    version=$(sed -n 's/^torch==//p' constraints.txt)
    [ -n "$build" ] || { if has_gpu; then build=default; else build=cpu; fi; }
    say "installing torch $version ($build build)"
    if [ "$build" = cpu ]; then
        install -c constraints.txt "torch==$version+cpu" 2>/dev/null && return
        install -c constraints.txt --retries 1 --timeout 15 \
            --extra-index-url https://download.pytorch.org/whl/cpu "torch==$version+cpu" 2>/dev/null && return
        say "found no CPU build of torch; taking the default one"
    fi
    install -c constraints.txt "torch==$version"
}

install() { "$VENV/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --no-input "$@"; }

main() {
    local wanted python started=$SECONDS
    wanted=$(contents)
    if [ -x "$VENV/bin/python" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || [ "$(cat "$ORIGIN" 2>/dev/null)" != "$(origin)" ]; then
        python=$(find_python)
        say "making $VENV with $("$python" --version); this takes a few minutes the first time"
        make_venv "$python"
        origin >"$ORIGIN"
    fi
    install_torch
    say "installing specrag and its tools"
    install -c constraints.txt --editable ".[$EXTRAS]"
    echo "$wanted" >"$STAMP"
    say "done in $((SECONDS - started)) s"
}

main </dev/null
