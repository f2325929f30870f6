#!/bin/sh
# Install Grafana's published types and TypeScript from npm, into a cache outside the checkout keyed by the lock file,
# and print the folder.
set -eu
say() { printf '\033[2m[grafana-types]\033[0m %s\n' "$*" >&2; }
here=$(cd "$(dirname "$0")" && pwd)
lock="$here/../tests/grafana/package-lock.json"
folder="${XDG_CACHE_HOME:-$HOME/.cache}/gputally/grafana-types/$(sha256sum "$lock" | cut -c1-16)"
if [ -x "$folder/node_modules/.bin/tsc" ]; then echo "$folder"; exit 0; fi

command -v npm >/dev/null 2>&1 || { echo "no npm on this machine: on Debian, 'apt-get install npm' provides it" >&2; exit 1; }
rm -rf "$folder.part"
mkdir -p "$folder.part"
cp "$here/../tests/grafana/package.json" "$lock" "$folder.part/"
say "installing Grafana's types: 26 MB, once"
(cd "$folder.part" && npm ci --ignore-scripts --no-audit --no-fund --silent) >&2
mv -T "$folder.part" "$folder"
echo "$folder"
