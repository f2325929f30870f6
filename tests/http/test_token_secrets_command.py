"""`gputally install`: Secrets with bearer tokens, created once, kept, and replaced after deletion."""

from __future__ import annotations

import base64
from typing import Any

import pytest
import yaml

from accountant.__main__ import main
from accountant.cli.token_secrets import SECRET, Plan, install
from gputally.base.errors import AccountantError, ClusterRefused, NotFound
from gputally.base.yaml_file import parse
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.server.config_loading import validate
from gputally.server.tokens_and_grants import TokenEntry, TokenList, sha256

ALL = Plan("gputally", "metering", programs=True, node="n1", cluster="prod")
SCOPES = {
    "admin": {"read", "policy", "admin"}, "fairshare": {"read", "policy"}, "backup": {"admin"}, "report": {"read"},
    "agent": {"ingest"},
}  # fmt: skip


def content(cluster: MemoryCluster, name: str, key: str) -> str:
    return base64.b64decode(cluster.get(SECRET, f"gputally-{name}", "metering")["data"][key]).decode()


def entries(cluster: MemoryCluster) -> dict[str, TokenEntry]:
    """Return the token file's entries, as the accountant reads it, by name."""
    text = content(cluster, "accountant-tokens", "tokens.yaml")
    return {entry.name: entry for entry in validate(parse(text, "tokens.yaml"), TokenList).tokens}


def secret(name: str, **data: str) -> dict[str, Any]:
    encoded = {key.replace("_", "."): base64.b64encode(text.encode()).decode() for key, text in data.items()}
    metadata = {"name": f"gputally-{name}", "namespace": "metering"}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": encoded}


def test_every_holder_has_a_token_that_the_accountant_knows_for_what_it_does() -> None:
    cluster = MemoryCluster([SECRET])
    assert set(install(ALL, cluster).values()) == {"made"}
    found = entries(cluster)
    assert {name.removeprefix("gputally-"): set(entry.scopes) for name, entry in found.items()} == SCOPES
    for name, entry in found.items():
        assert entry.token_sha256 == sha256(content(cluster, f"{name.removeprefix('gputally-')}-token", "token"))
        assert (entry.cluster, entry.node) == (("prod", "n1") if name == "gputally-agent" else (None, None))


def test_people_alone_need_one_token() -> None:
    cluster = MemoryCluster([SECRET])
    install(Plan("gputally", "metering"), cluster)
    assert set(entries(cluster)) == {"gputally-admin"}


def test_again_changes_nothing_and_more_is_added() -> None:
    cluster = MemoryCluster([SECRET])
    install(Plan("gputally", "metering"), cluster)
    before = cluster.list(SECRET)
    assert set(install(Plan("gputally", "metering"), cluster).values()) == {"kept"}
    assert cluster.list(SECRET) == before
    done = install(ALL, cluster)
    assert (done["gputally-accountant-tokens"], done["gputally-admin-token"]) == ("changed", "kept")
    assert done["gputally-backup-token"] == "made"


def test_a_token_is_replaced_when_its_secret_is_deleted() -> None:
    cluster = MemoryCluster([SECRET])
    install(ALL, cluster)
    before = entries(cluster)
    cluster.delete(SECRET, "gputally-report-token", "metering")
    done = install(ALL, cluster)
    assert done["gputally-report-token"] == "made"
    after = entries(cluster)
    assert {name for name in before if before[name] != after[name]} == {"gputally-report"}
    assert after["gputally-report"].token_sha256 == sha256(content(cluster, "report-token", "token"))


def test_entries_of_others_stay_and_a_lost_token_file_is_made_anew() -> None:
    theirs = f"# people\ntokens:\n- {{name: ann, token_sha256: {'a' * 64}, scopes: [read]}}  # the auditor\n"
    cluster = MemoryCluster([SECRET], [secret("accountant-tokens", tokens_yaml=theirs)])
    install(ALL, cluster)
    assert content(cluster, "accountant-tokens", "tokens.yaml").startswith(theirs)
    token = content(cluster, "admin-token", "token")
    cluster.delete(SECRET, "gputally-accountant-tokens", "metering")
    install(ALL, cluster)
    assert content(cluster, "admin-token", "token") == token, "who holds it goes on"
    assert entries(cluster)["gputally-admin"].token_sha256 == sha256(token)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("tokens: [{name: a}]\n", "Secret metering/gputally-accountant-tokens: tokens.yaml:1: tokens.0.scopes"),
        (
            f"tokens: [{{name: a, token_sha256: {'a' * 64}, scopes: [read]}}]\n",
            "tokens.yaml: write each entry on its own lines",
        ),
    ],
)
def test_a_token_file_that_cannot_be_changed_is_named_and_nothing_is_written(text: str, fault: str) -> None:
    cluster = MemoryCluster([SECRET], [secret("accountant-tokens", tokens_yaml=text)])
    with pytest.raises(AccountantError) as caught:
        install(ALL, cluster)
    assert fault in str(caught.value)
    assert len(cluster.list(SECRET)) == 1


class Missing(MemoryCluster):
    """A cluster without the namespace."""

    def create(self, obj: Any, *, field_manager: str, dry_run: bool = False) -> Any:
        raise NotFound('POST …: 404: namespaces "metering" not found')


class Forbidding(MemoryCluster):
    """A cluster whose caller may not read Secrets."""

    def get(self, kind: Any, name: str, namespace: str = "") -> Any:
        raise ClusterRefused("GET …: 403: secrets is forbidden")


def test_without_the_namespace_or_the_right_it_says_what_is_missing() -> None:
    with pytest.raises(AccountantError, match="no namespace metering: run"):
        install(ALL, Missing([SECRET]))
    with pytest.raises(AccountantError, match=r"Secret metering/gputally-accountant-tokens: .* forbidden"):
        install(ALL, Forbidding([SECRET]))


def test_a_dry_run_prints_manifests_that_make_the_same(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Any,
) -> None:
    nowhere = tmp_path / "kubeconfig"
    nowhere.write_text("apiVersion: v1\nkind: Config\nclusters: []\ncontexts: []\nusers: []\n")
    words = ["install", "--namespace", "metering", "--programs", "--kubeconfig", str(nowhere)]
    assert main([*words, "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "so this is printed as if none existed" in printed.err
    found = {m["metadata"]["name"]: m for m in yaml.safe_load_all(printed.out)}
    assert set(found) == {f"gputally-{name}" for name in (
        "accountant-tokens", "admin-token", "fairshare-token", "backup-token", "report-token",
    )}  # fmt: skip
    assert {m["metadata"]["namespace"] for m in found.values()} == {"metering"}
    listed = yaml.safe_load(found["gputally-accountant-tokens"]["stringData"]["tokens.yaml"])["tokens"]
    for entry in listed:
        assert entry["token_sha256"] == sha256(found[f"{entry['name']}-token"]["stringData"]["token"])
    assert main(words) == 1
    assert "--dry-run prints the manifests" in capsys.readouterr().err
