#!/bin/sh
# Install the FOCUS validators into a venv of their own, in a cache outside the checkout keyed by their locked list, and
# print its Python. They need Python 3.12, which the script looks for on PATH, in pyenv and with uv. If
# GPUTALLY_FOCUS_PYTHON is set to a Python that has the validators, only print it.
set -eu
say() { printf '\033[2m[focus]\033[0m %s\n' "$*" >&2; }
here=$(cd "$(dirname "$0")" && pwd)
list="$here/../tests/focus/requirements.txt"

if [ -n "${GPUTALLY_FOCUS_PYTHON:-}" ]; then echo "$GPUTALLY_FOCUS_PYTHON"; exit 0; fi

folder="${XDG_CACHE_HOME:-$HOME/.cache}/gputally/focus/$(sha256sum <"$list" | cut -c1-16)"
if [ -e "$folder/.ready" ]; then echo "$folder/bin/python"; exit 0; fi

is_312() { [ -n "$1" ] && "$1" -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; }
uv=$(command -v uv || echo "$here/../${VENV:-.venv}/bin/uv")
find_python() {
    for found in "${PYTHON:-}" "$(command -v python3.12 || true)" "$(command -v python3 || true)"; do
        if is_312 "$found"; then echo "$found"; return; fi
    done
    for found in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
        if is_312 "$found"; then echo "$found"; return; fi
    done
    if [ -x "$uv" ] && found=$("$uv" python find --quiet 3.12 2>/dev/null) && is_312 "$found"; then echo "$found"; return; fi
    if [ -x "$uv" ] && "$uv" python install --quiet 3.12 >&2 2>/dev/null; then "$uv" python find --quiet 3.12; return; fi
    echo "the FOCUS validators need Python 3.12, and it is neither on PATH nor in pyenv, nor could uv install it:" \
        "set GPUTALLY_FOCUS_PYTHON or install it (Debian: apt-get install python3.12-venv)" >&2
    return 1
}

python=$(find_python)
say "installing the validators with $("$python" --version)"
# A venv cannot be moved, so it is created in its final folder. --clear removes the remains of an interrupted run.
"$python" -m venv --clear "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --require-virtualenv -r "$list" >&2
touch "$folder/.ready"
say "ready: $folder"
echo "$folder/bin/python"
