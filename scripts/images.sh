#!/bin/sh
# Build the three images without a container engine: with Debian's buildah in a chroot, on a base image from debootstrap,
# with the wheels of the lock file. Base image, wheels and layers are in a cache outside the checkout. For each image, print
# its name and its reference in the store. $1 (optional): the only image to build.
set -eu
say() { printf '\033[2m[images]\033[0m %s\n' "$*" >&2; }
fail() { echo "images: $*" >&2; exit 1; }
cd "$(dirname "$0")/.."
cache="${XDG_CACHE_HOME:-$HOME/.cache}/gputally/images"
suite=bookworm
mirror="${DEBIAN_MIRROR:-http://deb.debian.org/debian}"
packages="python3,python3-venv,ca-certificates"

[ "$(id -u)" = 0 ] || fail "building in a chroot needs root"
for tool in buildah debootstrap; do
    command -v $tool >/dev/null 2>&1 || fail "$tool is missing: 'apt-get install buildah debootstrap' provides it"
done
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
driver=$(cat "$cache/driver" 2>/dev/null || true)
store() { buildah --root "$cache/store-$driver" --runroot /run/gputally-images --storage-driver "$driver" "$@"; }
if [ -z "$driver" ]; then
    # Use overlay layers if the file system supports them, otherwise copies.
    driver=overlay
    if probe=$(store from scratch 2>/dev/null) && store mount "$probe" >/dev/null 2>&1; then store rm "$probe" >/dev/null; else driver=vfs; fi
    echo $driver > "$cache/driver"
fi

base="localhost/gputally-base:$suite-$(echo "$packages" | sha256sum | cut -c1-12)"
if ! store inspect --type image "$base" >/dev/null 2>&1; then
    say "making the base with debootstrap: about a minute, once"
    container=$(store from scratch)
    root=$(store mount "$container")
    debootstrap --variant=minbase --include=$packages $suite "$root" "$mirror" >"$cache/debootstrap.log" 2>&1 || {
        tail -5 "$cache/debootstrap.log" >&2; store rm "$container" >/dev/null; fail "debootstrap could not make the base"; }
    rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/*
    store umount "$container" >/dev/null
    store commit --quiet --rm "$container" "$base" >/dev/null
fi

# The wheels must fit the base image's Python: 3.11 in bookworm.
if command -v uv >/dev/null 2>&1; then uv=uv; else uv="${VENV:-.venv}/bin/uv"; fi
wheels="$cache/wheels-$(sha256sum uv.lock | cut -c1-16)"
if [ ! -d "$wheels" ]; then
    say "fetching the locked wheels, once for each lock file"
    rm -rf "$cache"/wheels-*
    mkdir -p "$wheels.part"
    platforms=$(minor=5; while [ $minor -le 36 ]; do echo "--platform manylinux_2_${minor}_$(uname -m)"; minor=$((minor + 1)); done)
    [ -x "$cache/pip/bin/pip" ] || "${PYTHON:-python3}" -m venv "$cache/pip" >&2
    fetch="$cache/pip/bin/pip download --quiet --disable-pip-version-check --dest $wheels.part --only-binary :all:
           --python-version 3.11 --implementation cp $platforms --platform manylinux2014_$(uname -m)"
    "$uv" export --quiet --frozen --no-emit-project --only-group agent --only-group accountant --only-group fairshare \
        --output-file "$wheels.part/needs.txt" >/dev/null
    $fetch --no-deps --require-hashes --requirement "$wheels.part/needs.txt"
    $fetch 'uv>=0.13,<0.14' 'hatchling>=1.27,<2' pip
    mv "$wheels.part" "$wheels"
fi

revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
for image in ${1:-agent accountant fairshare}; do
    say "building $image"
    store bud --quiet --isolation chroot --network host --layers --target "$image" --volume "$wheels:/wheels:ro" \
        --build-arg BASE="$base" --build-arg PIP_NO_INDEX=1 --build-arg PIP_FIND_LINKS=/wheels --build-arg PIP_INDEX_URL= \
        --build-arg REVISION="$revision" --build-arg CREATED="$(git log -1 --format=%cI 2>/dev/null || echo 1970-01-01T00:00:00Z)" \
        --tag "localhost/gputally-$image:local" . >"$cache/build-$image.log" 2>&1 || {
        tail -15 "$cache/build-$image.log" >&2; fail "$image could not be built"; }
    echo "$image localhost/gputally-$image:local"
done
