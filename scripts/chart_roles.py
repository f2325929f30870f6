"""The chart's rights, from what states them: the manifests of holders (the agent) and of schedulers (`rights`), and
`accountant.inventory.rights`.

`scripts.reference_pages` writes them: a template that the chart's roles include, and the default names of the
ConfigMaps with the configuration of schedulers in values.yaml. The chart knows the plug-ins of this package alone; the
page of another one says which role to create. What the controller may do whichever schedulers there are is in the
roles themselves, because values of the chart decide about it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

from accountant.inventory.rights import RIGHTS
from agent.holders import protocol as holders
from gputally.base.plugins import OURS, plugins
from gputally.kubernetes.rights import Rights
from gputally.kubernetes.scheduler_plugins import SchedulerPlugin

PROGRAMS: Final = ("agent", "accountant", "fairshare")
_NAMES: Final = "schedulerConfigMaps"
_HEAD: Final = """\
{{/* Rights of the programs. Written by `make reference` from the manifests of plug-ins and accountant/inventory. */}}
"""


def stated(schedulers: Sequence[SchedulerPlugin]) -> Iterator[tuple[str, Rights]]:
    """Yield the rights of the programs, each with what states it. schedulers: their manifests."""
    for one in plugins(holders.SEAM, holders.HolderPlugin):
        if one.package == OURS and one.manifest:
            yield from ((one.name, rights) for rights in one.manifest.rights)
    yield from (("accountant", rights) for rights in RIGHTS)
    yield from ((one.name, rights) for one in schedulers for rights in one.rights)


def template(schedulers: Sequence[SchedulerPlugin]) -> str:
    """Return a template with a named template of rules for each program, and one of the names of notes."""
    found = [(source, one) for source, one in stated(schedulers) if not one.setting]
    parts = (_defined(program, [each for each in found if each[1].program == program]) for program in PROGRAMS)
    return _HEAD + "".join(parts) + _notes(schedulers)


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


def _defined(program: str, found: Iterable[tuple[str, Rights]]) -> str:
    lines = [f'{{{{- define "gputally.rights.{program}" -}}}}']
    for preempting, several in groupby(found, lambda each: each[1].preempting):
        rules = [line for source, one in several for line in _rule(source, one)]
        lines += [f"{{{{- if .Values.{program}.rbac.preempt }}}}", *rules, "{{- end }}"] if preempting else rules
    return "\n".join([*lines, "{{- end }}"]) + "\n"


def _rule(source: str, rights: Rights) -> Iterator[str]:
    yield f"# {source}: {rights.why}"
    group = rights.group or '""'
    yield f"- apiGroups: [{group}]"
    yield f"  resources: [{', '.join(rights.resources.split())}]"
    if rights.name:
        yield f"  resourceNames: [{rights.name}]"
    yield f"  verbs: [{', '.join(rights.verbs.split())}]"


def _notes(schedulers: Iterable[SchedulerPlugin]) -> str:
    """Return a template with what follows the name of the controller's ConfigMap in a list of names."""
    names = "".join(f', {{{{ include "gputally.component" . }}}}-{one.name}' for one in schedulers if one.notes)
    return f'{{{{- define "gputally.schedulerNotes" -}}}}{names}{{{{- end }}}}\n'
