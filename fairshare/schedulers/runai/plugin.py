"""The manifest of Run:ai."""

from __future__ import annotations

from gputally.kubernetes.scheduler_plugins import PodJobLabels, SchedulerPlugin, SettingFile

SCHEDULER = SchedulerPlugin(
    name="runai",
    prefixes=("runai", "runai-department"),
    adapter="fairshare.schedulers.runai.adapter:RunaiAdapter",
    settings="fairshare.schedulers.runai.section:RunaiTarget",
    kinds=(),
    reaches="calls the API of Run:ai's control plane at targets.runai.url; writes over-quota weights there",
    page="docs/schedulers.md",
    jobs=PodJobLabels(kind="workloadKind", name="workloadName"),
    notes=True,
    files=(
        SettingFile("runai_credentials", "Folder with the files client-id and client-secret for Run:ai."),
        SettingFile("runai_ca_file", "PEM file of the CAs to trust for Run:ai (default: the system's)."),
    ),
    workloads=False,
)
