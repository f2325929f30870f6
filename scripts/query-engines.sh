#!/bin/sh
# Download the jars of Spark's Iceberg catalog and a Trino server with its Iceberg plugin from Maven Central, into a cache
# outside the checkout keyed by this file, and print the folder: spark/ has jars, trino/lib the server, trino/plugin/iceberg.
# Spark itself, ClickHouse and the Java that Trino runs on are packages of the `real` group.
set -eu
say() { printf '\033[2m[query-engines]\033[0m %s\n' "$*" >&2; }
out="${XDG_CACHE_HOME:-$HOME/.cache}/gputally/query-engines/$(sha256sum "$0" | cut -c1-16)"
if [ -d "$out" ]; then echo "$out"; exit 0; fi

central=https://repo1.maven.org/maven2
# Of Trino's later versions the archives are not on Maven Central.
trino=476
part="$out.part"

# Download $1, whose SHA-256 is $2, to $3.
download() {
    say "  ${1##*/}"
    curl --fail --silent --show-error --location --retry 5 --output "$3" "$central/$1"
    echo "$2  $3" | sha256sum --check --quiet >&2
}

say "downloading jars for Spark and Trino $trino: 670 MB, once"
rm -rf "$part"
mkdir -p "$part/spark" "$part/trino/plugin" "$part/archives"
download org/apache/iceberg/iceberg-spark-runtime-4.1_2.13/1.11.0/iceberg-spark-runtime-4.1_2.13-1.11.0.jar \
    d6ea6c5d099288daeb7d5a92061bd3d7d8f296492632b42378e5f2f0e3066242 "$part/spark/iceberg-spark-runtime.jar"
download org/apache/iceberg/iceberg-aws-bundle/1.11.0/iceberg-aws-bundle-1.11.0.jar \
    38f01da7e96850cdd05e6616d758b77b43314b712a8808e3f9a824d56976162f "$part/spark/iceberg-aws-bundle.jar"
download org/xerial/sqlite-jdbc/3.50.3.0/sqlite-jdbc-3.50.3.0.jar \
    a3f53a2aa15ae9425a9e793bbe9c8e5288febeb4b65ef5c1a4e80d4c2045cf08 "$part/spark/sqlite-jdbc.jar"
download org/postgresql/postgresql/42.7.8/postgresql-42.7.8.jar \
    2a32a9dcbc42d67a50ad3a0de5efd102c8d2be46720045f2cbd6689f160ab7c7 "$part/spark/postgresql.jar"
download io/trino/trino-server-core/$trino/trino-server-core-$trino.tar.gz \
    0f388f9967c177ae70a47c099082fc95387f0c3cb96d8000d1d41fc3a5223158 "$part/archives/server.tar.gz"
download io/trino/trino-iceberg/$trino/trino-iceberg-$trino.zip \
    99edba5b491ed94d599aeb61e0794272d3569d8b563f3bb8569e8a49daa87b6c "$part/archives/iceberg.zip"
tar -xzf "$part/archives/server.tar.gz" -C "$part/trino" --strip-components=1 "trino-server-core-$trino/lib"
"${PYTHON:-python3}" -m zipfile -e "$part/archives/iceberg.zip" "$part/archives"
mv "$part/archives/trino-iceberg-$trino" "$part/trino/plugin/iceberg"
# A catalog in SQLite needs its driver beside the plugin's own for PostgreSQL.
ln "$part/spark/sqlite-jdbc.jar" "$part/trino/plugin/iceberg/"
rm -rf "$part/archives"
mv -T "$part" "$out"
say "ready: $out"
echo "$out"
