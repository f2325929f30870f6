#!/bin/sh
# Build kubectl, helm and actionlint from their published Go modules, for the commands of the documents and the check of the
# workflows, into a cache outside the checkout keyed by go.sum, and print the folder. If GPUTALLY_CLIENTS is set, only print it.
set -eu
say() { printf '\033[2m[clients]\033[0m %s\n' "$*" >&2; }
here=$(cd "$(dirname "$0")" && pwd)
. "$here/go.sh"

if [ -n "${GPUTALLY_CLIENTS:-}" ]; then echo "$GPUTALLY_CLIENTS"; exit 0; fi

module="$here/../tests/clients"
bin=$(module_folder clients "$module")
if [ -x "$bin/kubectl" ] && [ -x "$bin/helm" ] && [ -x "$bin/actionlint" ]; then echo "$bin"; exit 0; fi

find_go
version=$(cd "$module" && $go list -m -f '{{.Version}}' k8s.io/kubectl | sed 's/^v0/v1/')
mkdir -p "$bin.part"
say "building kubectl $version, helm and actionlint with $($go version | cut -d' ' -f3): about 4 minutes on 2 cores, once"
(cd "$module" && CGO_ENABLED=0 GOFLAGS=-buildvcs=false $go build -trimpath \
    -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$version" \
    -o "$bin.part/" ./kubectl helm.sh/helm/v4/cmd/helm github.com/rhysd/actionlint/cmd/actionlint) >&2
mv -T "$bin.part" "$bin"
say "ready: $bin"
echo "$bin"
