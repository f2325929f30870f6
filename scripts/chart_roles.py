"""The chart's rights for the objects of schedulers, from the manifests of the schedulers (`SchedulerPlugin.rights`).

`scripts.reference_pages` writes them: a template that the chart's roles include, and the default names of the
ConfigMaps with the configuration of schedulers in values.yaml. The chart knows the schedulers of this package alone;
the page of another one says which role to create."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from gputally.kubernetes.scheduler_plugins import Rights, SchedulerPlugin

PROGRAMS: Final = ("accountant", "fairshare")
_NAMES: Final = "schedulerConfigMaps"
_HEAD: Final = """\
{{/* Rights for the objects of schedulers. Written by `make reference` from the manifests in fairshare/schedulers. */}}
"""


def template(schedulers: Sequence[SchedulerPlugin]) -> str:
    """Return a template with a named template of rules for each program."""
    return _HEAD + "".join(_defined(program, schedulers) for program in PROGRAMS)


def values(text: str, schedulers: Sequence[SchedulerPlugin]) -> str:
    """Return values.yaml with the default names of the ConfigMaps of schedulers. text: the present file.

    Raises ValueError for a right whose object a policy can name and that is no ConfigMap: the chart has no value for
    the names of such objects."""
    found = [one for scheduler in schedulers for one in scheduler.rights if one.setting]
    known = ("fairshare", "", "configmaps", "get")
    if strange := [str(one) for one in found if (one.program, one.group, one.resources, one.verbs) != known]:
        raise ValueError(f"the chart has no value for the names of {'; '.join(strange)}")
    names = ", ".join(one.name for one in found)
    return re.sub(rf"(?m)^( +{_NAMES}: )\[.*\]$", rf"\g<1>[{names}]", text)


def _defined(program: str, schedulers: Sequence[SchedulerPlugin]) -> str:
    lines = [f'{{{{- define "gputally.schedulerRights.{program}" -}}}}']
    for scheduler in schedulers:
        own = [one for one in scheduler.rights if one.program == program and not one.setting]
        for preempting, rights in groupby(own, lambda one: one.preempting):
            rules = [line for one in rights for line in _rule(scheduler.name, one)]
            lines += [f"{{{{- if .Values.{program}.rbac.preempt }}}}", *rules, "{{- end }}"] if preempting else rules
    return "\n".join([*lines, "{{- end }}"]) + "\n"


def _rule(scheduler: str, rights: Rights) -> Iterator[str]:
    yield f"# {scheduler}: {rights.why}"
    group = rights.group or '""'
    yield f"- apiGroups: [{group}]"
    yield f"  resources: [{', '.join(rights.resources.split())}]"
    if rights.name:
        yield f"  resourceNames: [{rights.name}]"
    yield f"  verbs: [{', '.join(rights.verbs.split())}]"
