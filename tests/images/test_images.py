"""The content of the images, their size, and that they run."""

from __future__ import annotations

import hashlib
import json
import os
import re
import ssl
import subprocess
import tomllib
import urllib.error
import urllib.request
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.deadlines import until
from tests.images.conftest import IMAGES, ROOT, USER, Image
from tests.images.locked_packages import MOST_OF_THE_AGENT_MB, locked
from tests.real.programs import free_ports, running

pytestmark = [pytest.mark.real, pytest.mark.timeout(1_800)]  # the first builds what is not there yet
MB = 1_000_000
MOST_MB = {"agent": 40, "accountant": 750, "fairshare": 300}
"""What each adds to its base in /opt/gputally and /opt/program; docs/images.md states it."""
OURS = ("opt/gputally", "opt/program")
COMPILERS = re.compile(r"(.*-)?(gcc|g\+\+|cc|c\+\+|cpp|clang|ld|as|make|cargo|rustc|go)(-\d+)?")
TOOLS = ("pip", "uv", "hatchling", "setuptools", "wheel")


def megabytes(folder: Path) -> float:
    return sum(f.lstat().st_size for f in folder.rglob("*") if not f.is_dir()) / MB


def answered(url: str, token: str = "", authority: Path | None = None) -> tuple[int, bytes] | None:
    """Return status and body; None without an answer."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    trusted = ssl.create_default_context(cafile=authority) if authority else None
    try:
        with urllib.request.urlopen(request, timeout=5, context=trusted) as answer:
            return int(answer.status), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return None


def test_an_image_says_what_it_is_and_leaves_probes_to_the_chart(image: Image) -> None:
    config, project = image.config, tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert config["User"] == f"{USER}:{USER}"
    assert (config["Entrypoint"], config["Cmd"]) == (["gputally"], ["--help"])
    assert "Healthcheck" not in config
    labels = {
        k.removeprefix("org.opencontainers.image."): v for k, v in config["Labels"].items() if "opencontainers" in k
    }
    assert labels["title"] == f"gputally {image.name}"
    assert labels["version"] == project["version"]
    assert labels["licenses"] == project["license"]
    assert {"created", "description", "documentation", "revision", "url", "vendor"} <= set(labels)


def test_nothing_in_it_compiles_or_installs(image: Image) -> None:
    programs = [
        f for folder in ("usr/bin", "usr/local/bin", "opt/gputally/bin") for f in (image.root / folder).glob("*")
    ]
    assert [f.name for f in programs if COMPILERS.fullmatch(f.name)] == []
    assert not (image.root / "tools").exists()
    assert not (image.root / "src").exists()
    site = [d.name.lower() for d in (image.root / "opt/gputally/lib").glob("python*/site-packages/*")]
    assert [name for name in site if name.split("-")[0] in TOOLS] == []


def test_nobody_but_root_owns_its_files_and_none_lends_rights(image: Image) -> None:
    for folder in OURS:
        for file in (image.root / folder).rglob("*"):
            stat = file.lstat()
            assert (stat.st_uid, stat.st_gid) == (0, 0), file
            assert file.is_symlink() or not stat.st_mode & 0o6022, file


def test_it_holds_the_locked_versions_and_no_others(image: Image) -> None:
    site = next((image.root / "opt/gputally/lib").glob("python*/site-packages"))
    held = metadata.distributions(path=[str(site)])
    assert {re.sub(r"[-_.]+", "-", one.name).lower(): one.version for one in held} == locked(image.name)


def test_it_is_as_large_as_the_page_says(image: Image) -> None:
    size = sum(megabytes(image.root / folder) for folder in OURS)
    if image.name == "agent":
        assert megabytes(image.root / "opt/gputally") <= MOST_OF_THE_AGENT_MB
    assert size <= MOST_MB[image.name], f"{image.name}: {size:.0f} MB"
    page = (ROOT / "docs" / "images.md").read_text("utf-8")
    stated = re.search(rf"^\| `{image.name}` \|.*\| (\d+) MB \|$", page, re.MULTILINE)
    assert stated is not None
    assert abs(int(stated[1]) - size) <= max(3, 0.05 * size), f"{image.name}: {size:.0f} MB"


def test_it_runs_as_its_user_on_a_root_that_cannot_be_written(image: Image, data: Path) -> None:
    done = image.run("--version", data=data)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert re.fullmatch(r"gputally \d+\.\d+\.\d+\n", done.stdout)
    look = "id -u; id -g; for p in / /opt/gputally /usr /etc /var; do touch $p/x 2>/dev/null && echo $p; done"
    look += "; touch /tmp/x /mnt/x"
    done = subprocess.run(image.inside("sh", "-c", look, data=data), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, [USER, USER]), done.stderr


def test_each_has_its_own_program_and_says_what_it_lacks(image: Image, data: Path) -> None:
    done = image.run(image.name, "--help", data=data)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    other = {"agent": "accountant", "accountant": "agent", "fairshare": "accountant"}[image.name]
    done = image.run(other, "--help", data=data)
    if done.returncode:
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert "which is not installed" in done.stderr


SCENARIO = """
gpus: [{model: H100}, {model: H100}]
events:
  - {after_ms: 0, place: {gpu: 0, namespace: vision, pod: train, utilisation_ppm: 900000, memory_mib: 1000,
                          queue_ref: "kai:vision"}}
"""
PRICES = """
schema: 1
currency: EUR
rows: [{id: h100, model: H100, price: 2.40, per: gpu-hour, basis: gpu-only, source: test, valid_from: 2026-01-01,
        as_of: 2026-01-01}]
"""


def test_a_metered_interval_goes_through_all_three(built: dict[str, Image], data: Path, tmp_path: Path) -> None:
    """From a GPU to a report, a backup and a weight: each program in its image, over TLS as the chart configures it."""
    books, meter, controller = free_ports(3)
    url, secret, authority = f"https://127.0.0.1:{books}", "everything", data / "ca.crt"
    issuer = trustme.CA()
    issued = issuer.issue_cert("127.0.0.1")
    digest = hashlib.sha256(secret.encode()).hexdigest()
    files = {
        "tokens.yaml": f"tokens: [{{name: all, token_sha256: {digest}, scopes: [admin]}}]\n",
        "token": secret,
        "scenario.yaml": SCENARIO,
        "prices.yaml": PRICES,
        "policy.yaml": 'schema: 1\nqueues: [{name: vision, team: vision, refs: ["kai:vision"]}]\n',
        "objects.yaml": (ROOT / "fairshare/samples/cluster.yaml").read_text("utf-8"),
        "ca.crt": issuer.cert_pem.bytes().decode(),
        "tls.crt": "".join(part.bytes().decode() for part in issued.cert_chain_pems),
        "tls.key": issued.private_key_pem.bytes().decode(),
    }
    for name, text in files.items():
        (data / name).write_text(text, "utf-8")
        os.chown(data / name, int(USER), int(USER))
    logs = {name: tmp_path / f"{name}.log" for name in IMAGES}

    def said(name: str) -> str:
        return logs[name].read_text("utf-8")[-3000:]

    serve = ["serve", "--data=/mnt/ledger", f"--listen=127.0.0.1:{books}", "--tokens=/mnt/tokens.yaml"]
    serve += ["--prices=/mnt/prices.yaml", "--tls-cert=/mnt/tls.crt", "--tls-key=/mnt/tls.key"]
    meters = ["run", "--simulated=/mnt/scenario.yaml", f"--url={url}", "--token-file=/mnt/token", "--spool=/mnt/spool"]
    meters += ["--ca-file=/mnt/ca.crt", "--interval=1", "--sample=0.5", "--ship=1", f"--port={meter}", "--node=gpu-0"]
    weighs = ["run", "--policy=/mnt/policy.yaml", f"--url={url}", "--token-file=/mnt/token", "--interval=2s"]
    weighs += ["--ca-file=/mnt/ca.crt", "--objects=/mnt/objects.yaml", f"--listen=127.0.0.1:{controller}"]
    asking = [f"--url={url}", "--token-file=/mnt/token", "--ca-file=/mnt/ca.crt"]
    with running(built["accountant"].command("accountant", *serve, data=data), logs["accountant"]):
        until(lambda: (answered(f"{url}/readyz", "", authority) or (0,))[0] == 200, lambda: said("accountant"))
        with (
            running(built["agent"].command("agent", *meters, data=data), logs["agent"]) as agent,
            running(built["fairshare"].command("fairshare", *weighs, data=data), logs["fairshare"]) as fairshare,
        ):
            until(lambda: (answered(f"http://127.0.0.1:{meter}/livez") or (0,))[0] == 200, lambda: said("agent"))

            def used() -> Any:
                found = answered(f"{url}/v1/usage?by=pod", secret, authority)
                lines = json.loads(found[1])["lines"] if found and found[0] == 200 else []
                return [line for line in lines if "train" in str(line["key"])]

            until(used, lambda: said("agent") + said("accountant"))
            until(
                lambda: (answered(f"http://127.0.0.1:{controller}/readyz") or (0,))[0] == 200, lambda: said("fairshare")
            )
            for process in (agent, fairshare):
                assert process.poll() is None
            written = {"report.pdf": ["report", "--start=2026-01-01", "--format=pdf", "--to=/mnt/report.pdf"]}
            written["kept"] = ["backup", "--to=/mnt/kept", "--keep=2"]
            for name, words in written.items():
                done = built["accountant"].run(*words, *asking, data=data)
                assert done.returncode == 0, done.stderr
                assert (data / name).exists()
            assert (data / "report.pdf").read_bytes().startswith(b"%PDF-")
            assert len(list((data / "kept").glob("ledger-*.duckdb"))) == 1
            agent.terminate()
            assert agent.wait(30) == 0, said("agent")
            fairshare.terminate()
            assert fairshare.wait(30) == 0, said("fairshare")
    assert "Traceback" not in "".join(said(name) for name in IMAGES)
