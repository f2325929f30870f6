"""Layers of settings, the places of faults, and a description for every setting."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml

from agent.core import settings
from agent.core.settings import AgentSettings, SettingsError


def faults(config: Path | None, environ: dict[str, str], flags: dict[str, object]) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        settings.load(config, environ, flags)
    return str(caught.value).splitlines()


def test_later_layers_win(tmp_path: Path) -> None:
    config = tmp_path / "agent.yaml"
    config.write_text("cluster: file\nnode: file\nport: 1\nsample_s: 1\n")
    environ = {"GPUTALLY_AGENT_CLUSTER": "env", "GPUTALLY_AGENT_NODE": "env", "UNRELATED": "x"}
    chosen = settings.load(config, environ, {"cluster": "flag"})
    assert (chosen.cluster, chosen.node, chosen.port, chosen.sample_s) == ("flag", "env", 1, 1.0)
    assert settings.load(None, {}, {}) == AgentSettings()


def test_text_from_the_environment_and_flags_is_converted() -> None:
    environ = {
        "GPUTALLY_AGENT_DCGM_NAMES": "true",
        "GPUTALLY_AGENT_INTERVAL_S": "300",
    }
    chosen = settings.load(None, environ, {"sample_s": "0.5"})
    assert (chosen.dcgm_names, chosen.interval_s, chosen.sample_s) == (True, 300, 0.5)


def test_every_fault_is_told_with_its_place(tmp_path: Path) -> None:
    config = tmp_path / "agent.yaml"
    config.write_text("cluster: c\nintervall_s: 60\nport: many\nspool_max_mib: 0\n")
    environ = {"GPUTALLY_AGENT_URLL": "x", "GPUTALLY_AGENT_GRACE_S": "long"}
    assert faults(config, environ, {"interval_s": "7", "month_zone": "Mars/Base"}) == [
        f"{config}:2: unknown setting 'intervall_s'",
        f"{config}:3: port: Expected `int`, got `str`",
        f"{config}:4: spool_max_mib: Expected `int` >= 1",
        "GPUTALLY_AGENT_GRACE_S: grace_s: Expected `float`, got `str`",
        "GPUTALLY_AGENT_URLL: unknown setting 'urll'",
        "--interval: interval_s: 7 does not divide 900",
        "--month-zone: month_zone: unknown time zone 'Mars/Base'",
    ]


@pytest.mark.parametrize(("text", "fault"), [
    ("a: [\n", ":2: "),
    ("- a\n", ":1: expected settings as `name: value`"),
    ("node: a\nnode: b\n", ":2: key 'node' occurs twice"),
])  # fmt: skip
def test_a_file_that_is_none(tmp_path: Path, text: str, fault: str) -> None:
    config = tmp_path / "agent.yaml"
    config.write_text(text)
    (found,) = faults(config, {}, {})
    assert found.startswith(f"{config}{fault}")


def test_a_missing_file_is_a_fault_and_an_empty_one_is_not(tmp_path: Path) -> None:
    assert faults(tmp_path / "none.yaml", {}, {}) == [f"{tmp_path}/none.yaml: No such file or directory"]
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert settings.load(tmp_path / "empty.yaml", {}, {}) == AgentSettings()


def test_ways_of_running_exclude_each_other(tmp_path: Path) -> None:
    config = tmp_path / "agent.yaml"
    config.write_text("holders: processes\n")
    wrong = f"{config}:1: holders: cannot be combined with simulated; choose one"
    assert faults(config, {}, {"simulated": "p.yaml"}) == [wrong]


@pytest.mark.parametrize("interval_s", [1, 15, 60, 300, 900])
def test_intervals_that_divide_a_quarter_of_an_hour(interval_s: int) -> None:
    assert settings.load(None, {}, {"interval_s": str(interval_s)}).interval_s == interval_s


def test_every_setting_says_what_it_means() -> None:
    for name in settings.names():
        assert settings.description(name).endswith("."), name


def test_the_printed_configuration_is_a_configuration(tmp_path: Path) -> None:
    chosen = settings.load(None, {}, {"node": "n: 1", "url": "https://a", "interval_s": "15"})
    printed = settings.render(chosen)
    assert msgspec.convert(yaml.safe_load(printed), AgentSettings) == chosen
    config = tmp_path / "agent.yaml"
    config.write_text(printed)
    assert settings.load(config, {}, {}) == chosen


def test_the_spool_is_where_this_user_may_write() -> None:
    home = {"HOME": "/home/u"}
    assert AgentSettings().spool_path(home, root=False) == Path("/home/u/.local/state/gputally/outbox.sqlite")
    assert AgentSettings().spool_path({"XDG_STATE_HOME": "/s"}, root=False) == Path("/s/gputally/outbox.sqlite")
    assert AgentSettings().spool_path(home, root=True) == Path("/var/lib/gputally/outbox.sqlite")
    assert AgentSettings(spool="/x").spool_path(home, root=True) == Path("/x/outbox.sqlite")


def test_the_node_is_called_what_kubernetes_calls_it() -> None:
    assert AgentSettings().node_name({"NODE_NAME": "n7"}) == "n7"
    assert AgentSettings(node="n8").node_name({"NODE_NAME": "n7"}) == "n8"
    assert AgentSettings().node_name({}) != ""


@pytest.mark.parametrize(("flags", "refused"), [
    ({"accounting": True}, True),
    ({"accounting": True, "privilege": "allocation"}, True),
    ({"accounting": True, "privilege": "process"}, False),
    ({"accounting": True, "holders": "processes"}, False),
])  # fmt: skip
def test_accounting_mode_needs_a_view_of_the_processes(flags: dict[str, object], refused: bool) -> None:
    if refused:
        with pytest.raises(SettingsError, match="--accounting: accounting: needs privilege process or profiling"):
            settings.load(None, {}, flags)
    else:
        assert settings.load(None, {}, flags).sees_processes


def test_kubernetes_is_what_is_met_where_nothing_else_was_chosen() -> None:
    assert settings.load(None, {}, {}).on_kubernetes
    assert not settings.load(None, {}, {}).sees_processes
    assert not settings.load(None, {}, {"holders": " kubelet "}).sees_processes
    assert settings.load(None, {}, {"holders": "kubelet="}).on_kubernetes
    for other in ({"holders": "processes"}, {"holders": "pods=f"}, {"simulated": "f"}, {"holders": "jobs=d"}):
        assert not settings.load(None, {}, other).on_kubernetes
