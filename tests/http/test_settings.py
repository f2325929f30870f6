"""Settings: three layers, every fault with its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from accountant.core.settings import Settings, load
from gputally.base.errors import SettingsFault
from gputally.server.loopback import is_loopback


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "accountant.yaml"
        path.write_text(text)
        return path

    return write


def faults(*arguments, **keywords):
    with pytest.raises(SettingsFault) as caught:
        load(*arguments, **keywords)
    return str(caught.value).splitlines()


def test_the_command_line_beats_the_environment_beats_the_file(file):
    path = file("auth: off\ntimezone: Europe/Berlin\nlinger_ms: 1\nlimits:\n  burst: 7\n  span_days: 9\n")
    environ = {"GPUTALLY_ACCOUNTANT_LINGER_MS": "2", "GPUTALLY_ACCOUNTANT_LIMITS__BURST": "8", "HOME": "/"}
    settings = load(path, environ, {"linger_ms": 3, "data": Path("there")})
    assert settings.timezone == "Europe/Berlin"
    assert settings.linger_ms == 3
    assert (settings.limits.burst, settings.limits.span_days) == (8, 9)
    assert settings.ledger_file == Path("there/ledger.duckdb")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("auth: off\nlinger: 1\n", ":2: linger: no such setting"),
        (
            "auth: off\nlimits:\n  body_bytes: 1\n",
            ":3: limits.body_bytes: must be at least 1024",
        ),
        ("auth: off\ntimezone: Mars\n", ":2: timezone: unknown time zone: 'Mars'"),
        ("listen: 0.0.0.0:8080\nauth: off\n", ":2: auth: auth: off needs a loopback address, and 0.0.0.0:8080 can be"),
        ("auth: off\nlisten: here\n", ":2: listen: not an address: 'here'"),
        ("auth: off\nlisten: 127.0.0.1:99999\n", ":2: listen: not an address"),
        ("auth: off\nauth: tokens\n", ":2: key 'auth' occurs twice"),
        ("- a\n", ":1: settings are a mapping"),
        ("auth: maybe\n", ":1: auth: give 'tokens' or 'off'"),
        ("a: [\n", ":2: "),
    ],
)
def test_a_fault_of_the_file_has_its_line(file, text, fault):
    path = file(text)
    assert any(line.startswith(f"{path}{fault}") for line in faults(path, {})), faults(path, {})


def test_every_fault_is_listed(file):
    assert len(faults(file("auth: off\nlinger_ms: -1\ntimezone: Mars\ncolour: red\n"), {})) == 3


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("LINGER_MS", "soon", "GPUTALLY_ACCOUNTANT_LINGER_MS: must be a whole number"),
        ("COLOUR", "red", "GPUTALLY_ACCOUNTANT_COLOUR: no such setting"),
        ("AUTH__X", "1", "auth is not a group"),
    ],
)
def test_a_fault_of_the_environment_names_the_variable(name, value, said):
    (fault, *more) = faults(None, {"GPUTALLY_ACCOUNTANT_AUTH": "off", f"GPUTALLY_ACCOUNTANT_{name}": value})
    assert (said in fault, more) == (True, [])


def test_a_fault_of_the_command_line_names_the_option():
    assert faults(None, {}, {"auth": "off", "listen": "x"})[0].startswith("--listen: not an address")


def test_tokens_are_needed_unless_switched_off():
    assert faults(None, {})[0].startswith("tokens: no token file")


def test_a_missing_file_is_one_line(tmp_path):
    assert faults(tmp_path / "none.yaml", {}) == [f"{tmp_path / 'none.yaml'}: No such file or directory"]


def test_what_is_printed_reads_back(file):
    settings = load(file("auth: off\nlisten: '[::1]:0'\ncheckpoint_seconds: 10m\n"), {})
    assert settings.checkpoint_seconds == 600
    assert (settings.host, settings.port) == ("::1", 0)
    again = file(settings.as_yaml())
    assert load(again, {}) == settings
    assert yaml.safe_load(settings.as_yaml()).keys() == Settings.model_fields.keys()


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("example.org", False)],
)  # fmt: skip
def test_loopback(host, loopback):
    assert is_loopback(host) is loopback


def test_what_kubernetes_puts_into_the_environment_is_no_setting():
    linked = {
        "GPUTALLY_ACCOUNTANT_SERVICE_HOST": "10.0.0.1", "GPUTALLY_ACCOUNTANT_SERVICE_PORT": "80",
        "GPUTALLY_ACCOUNTANT_SERVICE_PORT_HTTP": "80", "GPUTALLY_ACCOUNTANT_PORT": "tcp://10.0.0.1:80",
        "GPUTALLY_ACCOUNTANT_PORT_80_TCP": "tcp://10.0.0.1:80", "GPUTALLY_ACCOUNTANT_PORT_80_TCP_ADDR": "10.0.0.1",
    }  # fmt: skip
    assert load(None, linked, {"auth": "off"}) == Settings(auth="off")
