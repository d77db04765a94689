#!/usr/bin/env bash
# Writes requirements.lock: what the image installs, each package by version and hashes, at the versions of constraints.txt.
# Needs uv. torch is not in it, nor what its plain build brings for GPUs: the image takes torch's CPU build from PyTorch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly EXTRAS="local serve stores tracing"

main() {
    local options=() extra name
    for extra in $EXTRAS; do options+=(--extra "$extra"); done
    for name in torch triton $(sed -nE 's/^((cuda|nvidia)-[a-z0-9-]+)==.*/\1/p' <(compile "${options[@]}")); do
        options+=(--no-emit-package "$name")
    done
    {
        echo "# Made by scripts/lock.sh. What the image installs, and hatchling, which builds specrag in it."
        compile "${options[@]}" --generate-hashes
    } >requirements.lock
}

compile() {
    echo hatchling | uv pip compile --quiet --universal --python-version 3.12 --constraint constraints.txt \
        --no-annotate --no-header --no-emit-index-url "$@" pyproject.toml -
}

main
