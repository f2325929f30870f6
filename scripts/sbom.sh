#!/bin/sh
# Write a bill of materials (CycloneDX 1.5) of each image from the lock file: sbom.sh FOLDER [IMAGE...]
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
folder=$1
shift
if command -v uv >/dev/null 2>&1; then uv=uv; else uv="$here/${VENV:-.venv}/bin/uv"; fi
mkdir -p "$folder"
for image in ${*:-agent accountant fairshare}; do
    "$uv" export --quiet --project "$here" --frozen --only-group "$image" --format cyclonedx1.5 \
        --preview-features sbom-export --output-file "$folder/gputally-$image.cdx.json" >/dev/null
    echo "$folder/gputally-$image.cdx.json"
done
