#!/bin/sh
# Download the jars of Spark's Iceberg catalog, a Trino server with its Iceberg plugin, and a server of Iceberg's REST
# catalog from Maven Central, into a cache outside the checkout keyed by this file, and print the folder: spark/ has jars,
# trino/lib the server, trino/plugin/iceberg, rest/ what the REST catalog needs beside that plugin.
# Spark itself, its Hive metastore, ClickHouse and the Java that Trino runs on are packages of the `real` group.
set -eu
say() { printf '\033[2m[query-engines]\033[0m %s\n' "$*" >&2; }
out="${XDG_CACHE_HOME:-$HOME/.cache}/gputally/query-engines/$(sha256sum "$0" | cut -c1-16)"
if [ -d "$out" ]; then echo "$out"; exit 0; fi

central=https://repo1.maven.org/maven2
# Of Trino's later versions the archives are not on Maven Central.
trino=476
# The version among the plugin's jars.
iceberg=1.9.1
jetty=11.0.26
part="$out.part"

# Download $1, whose SHA-256 is $2, to $3.
download() {
    say "  ${1##*/}"
    curl --fail --silent --show-error --location --retry 5 --output "$3" "$central/$1"
    echo "$2  $3" | sha256sum --check --quiet >&2
}

say "downloading jars for Spark, Trino $trino and a REST catalog: 680 MB, once"
rm -rf "$part"
mkdir -p "$part/spark" "$part/trino/plugin" "$part/rest" "$part/archives"
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
download org/apache/iceberg/iceberg-open-api/$iceberg/iceberg-open-api-$iceberg-test-fixtures.jar \
    5fd058cf8bb976d0918cb3a24eb22af1fdd727f8b7c0bc2e4f32eadf04f191d8 "$part/rest/iceberg-rest-fixture.jar"
download org/apache/iceberg/iceberg-core/$iceberg/iceberg-core-$iceberg-tests.jar \
    6e739ae0e7716f9a7e11e4c59bab4bec1ee6872683cb9eeedf5964ba144ae423 "$part/rest/iceberg-core-tests.jar"
download org/eclipse/jetty/jetty-http/$jetty/jetty-http-$jetty.jar \
    de738c8cfd5701627b5373c42376453beb8276f989d75e5258e3b1ffe217e938 "$part/rest/jetty-http.jar"
download org/eclipse/jetty/jetty-io/$jetty/jetty-io-$jetty.jar \
    ce0ef76071e361d97f102e5cb48928b3cc66ac899d12be3ef0af8d06b4f768a1 "$part/rest/jetty-io.jar"
download org/eclipse/jetty/jetty-security/$jetty/jetty-security-$jetty.jar \
    1f0a1b58304741f243e2f6ac694e6506b1e26bb079cfc2baaa3f2a6ed4bf2d9f "$part/rest/jetty-security.jar"
download org/eclipse/jetty/jetty-server/$jetty/jetty-server-$jetty.jar \
    3cc3b203b96c7115151ea94cad8af43c0914bfb6fe20cf2ca8378ec6822fa471 "$part/rest/jetty-server.jar"
download org/eclipse/jetty/jetty-servlet/$jetty/jetty-servlet-$jetty.jar \
    c09469f1045f9e207732692b3bc56e8fe4d0599de52d3bd593927c4a9060e679 "$part/rest/jetty-servlet.jar"
download org/eclipse/jetty/jetty-util/$jetty/jetty-util-$jetty.jar \
    1b61b875a6d40e8fd44cffb307bdb66f3459370a152a50a092a698c3737eeca9 "$part/rest/jetty-util.jar"
download jakarta/servlet/jakarta.servlet-api/5.0.0/jakarta.servlet-api-5.0.0.jar \
    33d3a5bda82c7d2f1b898685faa954f1fc34f7b0ae5c2f6ccc6d051e8a10973b "$part/rest/jakarta.servlet-api.jar"
tar -xzf "$part/archives/server.tar.gz" -C "$part/trino" --strip-components=1 "trino-server-core-$trino/lib"
"${PYTHON:-python3}" -m zipfile -e "$part/archives/iceberg.zip" "$part/archives"
mv "$part/archives/trino-iceberg-$trino" "$part/trino/plugin/iceberg"
# A catalog in SQLite needs its driver beside the plugin's own for PostgreSQL.
ln "$part/spark/sqlite-jdbc.jar" "$part/trino/plugin/iceberg/"
rm -rf "$part/archives"
mv -T "$part" "$out"
say "ready: $out"
echo "$out"
