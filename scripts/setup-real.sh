#!/bin/sh
# Bring what `make test-real` needs beyond PyPI: Chromium, from the distribution's own packages.
set -eu
say() { printf '\033[2m[setup-real]\033[0m %s\n' "$*"; }

if command -v uv >/dev/null 2>&1; then uv=uv; else uv="$VENV/bin/uv"; fi
say "installing the browser driver"
UV_PROJECT_ENVIRONMENT="$VENV" "$uv" sync --frozen --all-extras --group real --inexact --quiet

if ! command -v chromium >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ]; then as_root=; elif command -v sudo >/dev/null 2>&1; then as_root=sudo; else
        echo "Chromium is not installed and this user may not install it: 'apt-get install chromium' as root" >&2
        exit 1
    fi
    say "installing Debian's chromium"
    $as_root apt-get update -qq
    DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null
fi
say "ready: $(chromium --version 2>/dev/null)"
