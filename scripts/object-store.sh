#!/bin/sh
# Build the Versity S3 gateway, an object store over a folder, from its published Go module, into a cache outside the
# checkout keyed by go.sum, and print the folder.
set -eu
say() { printf '\033[2m[object-store]\033[0m %s\n' "$*" >&2; }
here=$(cd "$(dirname "$0")" && pwd)
. "$here/go.sh"

module="$here/../tests/objectstore"
bin=$(module_folder object-store "$module")
if [ -x "$bin/versitygw" ]; then echo "$bin"; exit 0; fi

find_go
mkdir -p "$bin.part"
say "building versitygw with $($go version | cut -d' ' -f3): about a minute on 2 cores, once"
(cd "$module" && CGO_ENABLED=0 GOFLAGS=-buildvcs=false $go build -trimpath -ldflags '-s -w' \
    -o "$bin.part/" github.com/versity/versitygw/cmd/versitygw) >&2
mv -T "$bin.part" "$bin"
say "ready: $bin"
echo "$bin"
