#!/bin/sh
# Bundle the page that draws dashboards with Grafana's own panels (tests/grafana/preview), with packages from npm in a
# cache outside the checkout keyed by the lock file, and print the folder.
set -eu
say() { printf '\033[2m[grafana-preview]\033[0m %s\n' "$*" >&2; }
here=$(cd "$(dirname "$0")" && pwd)
source="$here/../tests/grafana/preview"
root="${XDG_CACHE_HOME:-$HOME/.cache}/gputally/grafana-preview/$(sha256sum "$source/package-lock.json" | cut -c1-16)"
out="$root/$(cat "$source"/*.ts "$source"/*.tsx "$0" | sha256sum | cut -c1-16)"
if [ -f "$out/preview.js" ]; then echo "$out"; exit 0; fi

command -v npm >/dev/null 2>&1 || { echo "no npm on this machine: on Debian, 'apt-get install npm' provides it" >&2; exit 1; }
if [ ! -d "$root/node_modules" ]; then
    rm -rf "$root.part"
    mkdir -p "$root.part"
    cp "$source/package.json" "$source/package-lock.json" "$root.part/"
    say "installing Grafana's panels: 430 MB, once"
    (cd "$root.part" && npm ci --legacy-peer-deps --ignore-scripts --no-audit --no-fund --silent) >&2
    rm -rf "$root"
    mv -T "$root.part" "$root"
fi
mkdir -p "$root/source" "$out.part"
cp "$source"/*.ts "$source"/*.tsx "$root/source/"
say "bundling"
(cd "$root/source" && ../node_modules/.bin/esbuild main.tsx --bundle --format=iife --minify --log-level=error \
    --define:process.env.NODE_ENV='"production"' --loader:.ttf=dataurl --loader:.svg=dataurl --jsx=automatic \
    --alias:react-custom-scrollbars-2=./scrollbars.ts --outfile="$out.part/preview.js") >&2
mv -T "$out.part" "$out"
echo "$out"
