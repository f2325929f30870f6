#!/bin/sh
# Make $VENV match uv.lock. Uses uv from PATH, or else installs it into the venv with pip.
# COMPILE: the option of `uv sync` that compiles bytecode; empty: Python compiles the modules that it loads.
set -eu
say() { printf '\033[2m[setup]\033[0m %s\n' "$*"; }

if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "gputally needs Python 3.11 or newer; '$PYTHON' is $("$PYTHON" --version 2>&1 || echo missing). Set PYTHON=/path/to/python3.11." >&2
    exit 1
fi
if command -v uv >/dev/null 2>&1; then
    uv=uv
    [ -x "$VENV/bin/python" ] || { say "creating $VENV with $("$PYTHON" --version)"; uv venv --quiet --python "$PYTHON" "$VENV"; }
else
    if [ ! -x "$VENV/bin/uv" ]; then
        say "creating $VENV with $("$PYTHON" --version) and installing uv into it"
        # Use the pip outside the venv if possible: installing pip into the venv takes longer than all packages.
        "$PYTHON" -m venv --without-pip "$VENV" && "$PYTHON" -m pip --python "$VENV/bin/python" install \
            --quiet --disable-pip-version-check 'uv>=0.13' 2>/dev/null || {
            "$PYTHON" -m venv "$VENV" || {
                echo "python3 -m venv failed: on Debian, 'apt-get install python3-venv' provides it" >&2; exit 1; }
            "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check 'uv>=0.13'
        }
    fi
    uv="$VENV/bin/uv"
fi
say "installing the locked packages (first time about a minute, cached afterwards)"
# --inexact keeps pip and uv themselves in the venv.
UV_PROJECT_ENVIRONMENT="$VENV" "$uv" sync --frozen --inexact ${COMPILE---compile-bytecode} --quiet
say "ready: $("$VENV/bin/python" --version), $("$VENV/bin/python" -c 'from importlib.metadata import distributions; print(len(list(distributions())))') packages"
