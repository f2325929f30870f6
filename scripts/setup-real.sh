#!/bin/sh
# Install what `make test-real` needs beyond PyPI from the distribution's packages: Chromium, openssl, npm, Pango (for PDF),
# PostgreSQL, Java (for Spark) and buildah (for images).
set -eu
say() { printf '\033[2m[setup-real]\033[0m %s\n' "$*"; }

if command -v uv >/dev/null 2>&1; then uv=uv; else uv="$VENV/bin/uv"; fi
say "installing the browser driver, Spark and ClickHouse: 1 GB, once"
UV_PROJECT_ENVIRONMENT="$VENV" "$uv" sync --frozen --group real --inexact --quiet

packages=
command -v chromium >/dev/null 2>&1 || packages="chromium fonts-dejavu-core"
command -v openssl >/dev/null 2>&1 || packages="$packages openssl"
command -v npm >/dev/null 2>&1 || packages="$packages nodejs npm"
command -v curl >/dev/null 2>&1 || packages="$packages curl ca-certificates"
ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || packages="$packages postgresql"
# Spark runs on Java 17 or 21. Trino uses a later Java from PyPI.
ls -d /usr/lib/jvm/java-17-* /usr/lib/jvm/java-21-* >/dev/null 2>&1 || packages="$packages openjdk-17-jre-headless"
"$VENV/bin/python" -c 'import weasyprint' 2>/dev/null || packages="$packages libpango-1.0-0 libpangoft2-1.0-0 libharfbuzz-subset0"
# Only root can build the images. For other users, their tests are skipped.
if [ "$(id -u)" = 0 ]; then
    for tool in buildah debootstrap; do command -v $tool >/dev/null 2>&1 || packages="$packages $tool"; done
fi
if [ -n "$packages" ]; then
    if [ "$(id -u)" = 0 ]; then as_root=; elif command -v sudo >/dev/null 2>&1; then as_root=sudo; else
        echo "missing, and this user may not install it: 'apt-get install $packages' as root" >&2
        exit 1
    fi
    say "installing Debian's $packages"
    $as_root apt-get update -qq
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null
fi
say "ready: $(chromium --version 2>/dev/null)"
