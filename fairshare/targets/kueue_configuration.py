"""Kueue's own configuration: whether its manager reads weights, and starts at all, with what stands there. Pure.

What switches fair sharing on differs by the version of the configuration:

- `v1beta2`: the section `fairSharing`, which must name `preemptionStrategies` and knows no `enable`; with anything else
  the manager exits.
- `v1beta1`: `fairSharing.enable: true`; without it the section is ignored.

Admission fair sharing is switched on by `admissionFairSharing` in both, and counts nothing while its
`usageHalfLifeTime` is 0, which is what an unset one is.

Source: kubernetes-sigs/kueue ff69552e79ad, apis/config, pkg/config (read strictly: an unknown key ends the manager).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gputally.base.yaml_file import MAX_CONFIG_CHARACTERS, FileFault, parse
from gputally.kubernetes.objects import Object

_CONFIGURATION_GROUP = "config.kueue.x-k8s.io/"
_FINAL, _INITIAL = "LessThanOrEqualToFinalShare", "LessThanInitialShare"
_STRATEGIES = ([_FINAL], [_INITIAL], [_FINAL, _INITIAL])
_ZERO = re.compile(r"[+-]?(0+(\.0*)?(ns|us|µs|ms|s|m|h)?)*")


@dataclass(frozen=True, slots=True)
class Configuration:
    """version: of the document, such as `v1beta2`. fair: weights of ClusterQueues and Cohorts are read. admission:
    weights of LocalQueues are, where their ClusterQueue asks for it. frozen: as `admission`, but nothing is counted.
    fault: why the manager does not start with it, "" where nothing is known against it."""

    version: str
    fair: bool
    admission: bool
    frozen: bool = False
    fault: str = ""


def read_configuration(config_maps: Iterable[Object]) -> Configuration | None:
    """The first configuration of Kueue in one of these ConfigMaps; None where there is none that can be read."""
    for config_map in config_maps:
        for key, text in sorted((config_map.get("data") or {}).items()):
            try:
                document = parse(text, key, MAX_CONFIG_CHARACTERS).data
            except FileFault:
                continue
            if isinstance(document, dict) and str(document.get("apiVersion", "")).startswith(_CONFIGURATION_GROUP):
                return _configuration(document)
    return None


def fair_sharing_lines(version: str) -> str:
    """What switches fair sharing on, in a configuration of this version."""
    if version == "v1beta1":
        return "fairSharing: {enable: true}"
    return f"fairSharing: {{preemptionStrategies: [{_FINAL}, {_INITIAL}]}}"


def admission_lines() -> str:
    """What switches admission fair sharing on, in any version."""
    return "admissionFairSharing: {usageHalfLifeTime: 168h, usageSamplingInterval: 5m}"


def _configuration(document: Mapping[str, Any]) -> Configuration:
    version = str(document["apiVersion"]).removeprefix(_CONFIGURATION_GROUP)
    fair, fault = _fair_sharing(version, document.get("fairSharing"))
    admission = document.get("admissionFairSharing")
    gates = document.get("featureGates")
    switched_off = isinstance(gates, Mapping) and gates.get("AdmissionFairSharing") is False
    on = isinstance(admission, Mapping) and not switched_off
    frozen = isinstance(admission, Mapping) and bool(_ZERO.fullmatch(str(admission.get("usageHalfLifeTime") or "0")))
    return Configuration(version, fair, on, frozen, fault)


def _fair_sharing(version: str, section: object) -> tuple[bool, str]:
    """Whether weights are read, and why the manager does not start."""
    if section is None:
        return False, ""
    if not isinstance(section, Mapping):
        return False, "fairSharing is no section"
    known = {"preemptionStrategies"} | ({"enable"} if version == "v1beta1" else set())
    strange = sorted(str(key) for key in section if key not in known)
    if strange:
        return False, f"fairSharing.{strange[0]} is unknown in {version}"
    if version == "v1beta1" and section.get("enable") is not True:
        return False, ""
    strategies = section.get("preemptionStrategies")
    if not strategies:
        return version == "v1beta1", "" if version == "v1beta1" else "fairSharing.preemptionStrategies is required"
    if strategies not in _STRATEGIES:
        return False, f"fairSharing.preemptionStrategies are {strategies}"
    return True, ""
