#!/bin/sh
# Build kube-apiserver, etcd, kube-scheduler and kube-controller-manager from their published Go modules,
# into a cache outside the checkout keyed by go.sum, and print the folder. If KUBEBUILDER_ASSETS is set, only print it.
set -eu
say() { printf '\033[2m[control-plane]\033[0m %s\n' "$*" >&2; }
. "$(dirname "$0")/go.sh"
here=$(cd "$(dirname "$0")/../tests/controlplane" && pwd)

if [ -n "${KUBEBUILDER_ASSETS:-}" ]; then echo "$KUBEBUILDER_ASSETS"; exit 0; fi

bin=$(module_folder control-plane "$here")
if [ -x "$bin/kube-apiserver" ] && [ -x "$bin/etcd" ] && [ -x "$bin/kube-scheduler" ] && [ -x "$bin/kube-controller-manager" ]; then
    echo "$bin"; exit 0
fi

find_go
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
