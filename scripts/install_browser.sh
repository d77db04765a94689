#!/usr/bin/env bash
# Debian's chromium, which the page's tests drive. Does nothing where a browser is there already, and nothing but say
# so where it cannot be installed: those tests are skipped then.
set -euo pipefail

say() { printf 'browser: %s\n' "$*" >&2; }

main() {
    if command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; then
        return
    fi
    if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
        say "no chromium, and only root on Debian can install it here; the page's tests will be skipped"
        return
    fi
    say "installing Debian's chromium for the page's tests"
    apt-get update -qq || say "the list of packages could not be renewed; trying with the old one"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null ||
        say "chromium could not be installed; the page's tests will be skipped"
}

main </dev/null
