#!/bin/sh
# Build Prometheus and promtool from their published Go module, into a cache outside the checkout keyed by go.sum,
# and print the folder. If GPUTALLY_PROMETHEUS is set, only print it.
set -eu
say() { printf '\033[2m[prometheus]\033[0m %s\n' "$*" >&2; }
here=$(cd "$(dirname "$0")" && pwd)
. "$here/go.sh"

if [ -n "${GPUTALLY_PROMETHEUS:-}" ]; then echo "$GPUTALLY_PROMETHEUS"; exit 0; fi

module="$here/../tests/prometheus"
bin=$(module_folder prometheus "$module")
if [ -x "$bin/prometheus" ] && [ -x "$bin/promtool" ]; then echo "$bin"; exit 0; fi

find_go
mkdir -p "$bin.part"
say "building Prometheus and promtool with $($go version | cut -d' ' -f3): about 6 minutes on 2 cores, once"
for program in prometheus promtool; do
    say "  $program"
    # The tag leaves out the service discovery of public clouds, which is most of the build and which no test needs.
    (cd "$module" && CGO_ENABLED=0 GOFLAGS=-buildvcs=false $go build -trimpath -tags netgo,remove_all_sd -ldflags '-s -w' \
        -o "$bin.part/" "github.com/prometheus/prometheus/cmd/$program") >&2
done
mv -T "$bin.part" "$bin"
say "ready: $bin"
echo "$bin"
