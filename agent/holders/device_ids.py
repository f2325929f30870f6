"""Maps the device names of device plugins and DRA drivers to a GPU or MIG instance of this node.

| Form | Written by |
|---|---|
| `GPU-<uuid>`, `MIG-<uuid>` | NVIDIA's device plugin |
| `<either>::<k>` | the same, time-slicing or MPS: replica k |
| `MIG-GPU-<uuid>/<gi>/<ci>` | drivers before 470 |
| `nvidia<N>`, `nvidia<N>/gi<M>`, `<either>/vgpu<K>` | GKE's device plugin; N is the device's minor number |
| `<either>-<k>` | HAMi's device plugin: virtual device k |
| `gpu-<N>`, `gpu-<N>-mig-<profile>-<id>-<start>` | NVIDIA's DRA driver; N is the minor number |

A name means something only against the devices that are there, so it is looked up among them: what does
not name one of them is None. Pure.
Sources: NVIDIA/k8s-device-plugin internal/rm, GoogleCloudPlatform/container-engine-accelerators
pkg/gpu/nvidia, Project-HAMi/HAMi pkg/device-plugin, kubernetes-sigs/dra-driver-nvidia-gpu.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.core.readings import Gpu

NVIDIA_DRA = "gpu.nvidia.com"
"""Name of NVIDIA's DRA driver for GPUs."""
_REPLICA = re.compile(r"(.+)::(\d{1,6})")
_OLD_MIG = re.compile(r"MIG-(GPU-[0-9A-Za-z-]+)/(\d{1,4})/(\d{1,4})")
_GKE = re.compile(r"nvidia(\d{1,4})(?:/gi(\d{1,4}))?(?:/vgpu(\d{1,6}))?")
_HAMI = re.compile(r"(.+)-(\d{1,6})")
_DRA = re.compile(r"gpu-(\d{1,4})(?:-mig-([0-9a-z.+]+)-(\d{1,4})-(\d{1,4}))?")
_LIKE_A_GPU = re.compile(r"(?:MIG-)?GPU-|MIG-|nvidia\d")


@dataclass(frozen=True, slots=True)
class Place:
    """A GPU, or one of its MIG instances. replica: which of its equal parts; "" for the whole. virtual: the part is
    one of HAMi's virtual devices, which are not equal."""

    gpu_uuid: str
    mig_uuid: str = ""
    replica: str = ""
    virtual: bool = False


def _by_minor(gpus: Sequence[Gpu]) -> dict[int, Gpu]:
    """The GPUs by minor number. Of a GPU whose number was not read, it is known only where a single one is left: its
    index may be another GPU's minor number."""
    known = {gpu.minor: gpu for gpu in gpus if gpu.minor is not None}
    unread = [gpu for gpu in gpus if gpu.minor is None]
    left = set(range(len(gpus))) - known.keys()
    if len(unread) == 1 and len(left) == 1:
        known[left.pop()] = unread[0]
    return known


class DeviceNames:
    """Looks names up among `gpus`. claimable: the uuids of devices of NVIDIA's DRA driver, by pool and name."""

    def __init__(self, gpus: Sequence[Gpu], claimable: Mapping[tuple[str, str], str] | None = None) -> None:
        self._claimable = claimable or {}
        self._places: dict[str, Place] = {}
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        self._minors = _by_minor(gpus)
        for gpu in gpus:
            self._places[gpu.uuid] = Place(gpu.uuid)
            for instance in gpu.mig:
                self._places[instance.uuid] = Place(gpu.uuid, instance.uuid)

    def place(self, name: str) -> Place | None:
        """Where a device plugin's id points to."""
        found = self._places.get(name)
        if found is not None:
            return found
        if replica := _REPLICA.fullmatch(name):
            whole = self.place(replica.group(1))
            return None if whole is None else Place(whole.gpu_uuid, whole.mig_uuid, replica.group(2))
        if gke := _GKE.fullmatch(name):
            return self._numbered(int(gke.group(1)), gke.group(2), gke.group(3) or "")
        if old := _OLD_MIG.fullmatch(name):
            return self._instance(self._gpus.get(old.group(1)), int(old.group(2)), int(old.group(3)))
        if hami := _HAMI.fullmatch(name):
            whole = self._places.get(hami.group(1))
            return None if whole is None else Place(whole.gpu_uuid, whole.mig_uuid, hami.group(2), virtual=True)
        return None

    def claimed(self, pool: str, device: str) -> Place | None:
        """Where a device of NVIDIA's DRA driver is: by its published uuid, else by its name. A MIG device made
        on demand names the profile it was made of, not the instance: it is found where the GPU has one
        instance of that profile only."""
        published = self._places.get(self._claimable.get((pool, device), ""))
        if published is not None:
            return published
        match = _DRA.fullmatch(device)
        gpu = self._minors.get(int(match.group(1))) if match else None
        if match is None or gpu is None:
            return None
        if match.group(2) is None:
            return Place(gpu.uuid)
        profile = _plain(match.group(2))
        made = [instance for instance in gpu.mig if _plain(instance.profile) == profile]
        return Place(gpu.uuid, made[0].uuid) if len(made) == 1 else None

    def _numbered(self, minor: int, gi: str | None, replica: str) -> Place | None:
        gpu = self._minors.get(minor)
        if gpu is None:
            return None
        if gi is None:
            return Place(gpu.uuid, replica=replica)
        found = self._instance(gpu, int(gi), None)
        return None if found is None else Place(found.gpu_uuid, found.mig_uuid, replica)

    def _instance(self, gpu: Gpu | None, gi: int, ci: int | None) -> Place | None:
        if gpu is None:
            return None
        return next((Place(gpu.uuid, m.uuid) for m in gpu.mig if m.gi == gi and ci in (None, m.ci)), None)


def like_a_gpu(name: str) -> bool:
    """Whether an id that points nowhere was meant for a GPU, rather than for a network card."""
    return _LIKE_A_GPU.match(name) is not None


def _plain(profile: str) -> str:
    """DRA device names write `1g10gb` for `1g.10gb`."""
    return profile.replace(".", "").replace("+", "")
