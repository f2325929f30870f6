"""Kueue's configuration read as Kueue reads it.

Each document went through Kueue's own strict decoder, defaults and conversion (ff69552e79ad, apis/config), and the list
of strategies that its validation knows: what it said stands beside it."""

from __future__ import annotations

import pytest

from fairshare.targets.kueue import ADMISSION_LINES, Configuration, fair_sharing_lines, read_configuration

ALIASES = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]" for n in range(1, 9)]
)
"""Nine lines that stand for 134 million values."""
_ON, _OFF, _EXITS = (True, False), (False, False), (False, True)
"""(weights are read, the manager does not start)."""


def read(version: str, text: str) -> Configuration:
    document = f"apiVersion: config.kueue.x-k8s.io/{version}\nkind: Configuration\n{text}\n"
    found = read_configuration(
        [{"data": {"other.txt": "no: configuration", "controller_manager_config.yaml": document}}]
    )
    assert found is not None
    assert found.version == version
    return found


@pytest.mark.parametrize(("version", "text", "wanted"), [
    ("v1beta2", fair_sharing_lines("v1beta2"), _ON),
    ("v1beta2", "fairSharing: {}", _EXITS),
    ("v1beta2", "fairSharing: {enable: true, preemptionStrategies: [LessThanInitialShare]}", _EXITS),
    ("v1beta2", "fairSharing: {preemptionStrategies: [LessThanInitialShare, LessThanOrEqualToFinalShare]}", _EXITS),
    ("v1beta2", "fairSharing: {preemptionStrategies: [LessThanInitialShare]}", _ON),
    ("v1beta2", "fairSharing: null", _OFF),
    ("v1beta2", "# fairSharing: {}", _OFF),
    ("v1beta1", fair_sharing_lines("v1beta1"), _ON),
    ("v1beta1", "fairSharing: {}", _OFF),
    ("v1beta1", "fairSharing: {preemptionStrategies: [LessThanInitialShare]}", _OFF),
    ("v1beta1", "fairSharing: {enable: false, preemptionStrategies: [Nonsense]}", _OFF),
    ("v1beta1", "fairSharing: {enable: true, preemptionStrategies: [Nonsense]}", _EXITS),
    ("v1beta1", "fairSharing: {enable: true, foo: 1}", _EXITS),
])  # fmt: skip
def test_fair_sharing_is_on_where_kueues_manager_starts_with_it(
    version: str, text: str, wanted: tuple[bool, bool]
) -> None:
    found = read(version, text)
    assert (found.fair, bool(found.fault)) == wanted
    assert not found.admission


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
@pytest.mark.parametrize(("text", "admission", "frozen"), [
    (ADMISSION_LINES, True, False),
    ("admissionFairSharing: {usageSamplingInterval: 5m}", True, True),
    ("admissionFairSharing: {usageHalfLifeTime: 0s}", True, True),
    (f"{ADMISSION_LINES}\nfeatureGates: {{AdmissionFairSharing: false}}", False, False),
    ("", False, False),
])  # fmt: skip
def test_admission_fair_sharing_is_switched_on_apart(version: str, text: str, admission: bool, frozen: bool) -> None:
    found = read(version, text)
    assert (found.admission, found.no_half_life, found.fair) == (admission, frozen, False)


def test_what_is_no_configuration_of_kueue_is_none() -> None:
    assert read_configuration([{"data": {"a": "kind: Configuration", "b": ": no yaml: ["}}, {}]) is None


@pytest.mark.parametrize("text", [
    ALIASES,
    "fairSharing: " + "[" * 50_000,
    f"# {'x' * 131_072}",
    "fairSharing: !!timestamp never",
], ids=["aliases", "depth", "length", "tag"])  # fmt: skip
def test_a_configuration_that_would_cost_too_much_is_none(text: str) -> None:
    document = f"apiVersion: config.kueue.x-k8s.io/v1beta2\nkind: Configuration\n{text}\n"
    assert read_configuration([{"data": {"controller_manager_config.yaml": document}}]) is None
