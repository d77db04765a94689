#!/usr/bin/env bash
# Writes requirements.lock: what the image installs, each package by version and hashes, at the versions of constraints.txt.
# Needs uv. torch is its CPU build, which PyTorch's own index has; what the plain build brings for GPUs is left out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly EXTRAS="local serve stores tracing"
# The CPU build for Python 3.12, on x86_64 and on aarch64; a new version of torch needs new ones.
readonly TORCH="torch==2.13.0+cpu"
readonly TORCH_HASHES=(
    4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2
    6f307c2c32d764ffc6ff6893b801fad6d4752f3e67966cb8abf1843427c02604
)

main() {
    local options=() extra name
    grep -qx "${TORCH%+cpu}" constraints.txt || die "$TORCH is not the version of constraints.txt; name it and its hashes"
    for extra in $EXTRAS; do options+=(--extra "$extra"); done
    for name in torch triton $(sed -nE 's/^((cuda|nvidia)-[a-z0-9-]+)==.*/\1/p' <(compile "${options[@]}")); do
        options+=(--no-emit-package "$name")
    done
    {
        echo "# Made by scripts/lock.sh. What the image installs, and hatchling, which builds specrag in it."
        printf '%s' "$TORCH"; printf ' \\\n    --hash=sha256:%s' "${TORCH_HASHES[@]}"; echo
        compile "${options[@]}" --generate-hashes
    } >requirements.lock
}

die() { printf 'lock: %s\n' "$*" >&2; exit 1; }

compile() {
    echo hatchling | uv pip compile --quiet --universal --python-version 3.12 --constraint constraints.txt \
        --no-annotate --no-header --no-emit-index-url "$@" pyproject.toml -
}

main
