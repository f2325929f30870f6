"""A node on the fake NVML library, with pods that each have one process. The rig knows the true busy time and meters
the node once a second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from zoneinfo import ZoneInfo

from agent.core.readings import Allocation, Gpu, NodeSnapshot
from agent.gpu_readers.nvml.driver_lifecycle import Gpus
from agent.gpu_readers.nvml.nvml_device import Access
from agent.gpu_readers.nvml.nvml_library import Driver
from agent.holders.process_cgroups import ProcessTable
from agent.holders.protocol import Holdings
from agent.metering.meter import ClosedSet, Meter
from agent.node_reader import NodeSource
from agent.wire import Holder, UsageInterval
from tests.agent.readers import nvml_alone
from tests.agent.sample_values import GIB, T0
from tests.fakes.nvml.library import FakeNvml
from tests.fakes.process_table import add_process


class Assignments:
    """The kubelet's allocations: which pod holds which device."""

    def __init__(self) -> None:
        self.claims: dict[str, Allocation] = {}

    def read(self, at_ms: int, gpus: Sequence[Gpu]) -> Holdings:
        return Holdings(allocations=tuple(self.claims.values()), facts=())

    def close(self) -> None:
        """Holds nothing."""


class Rig:
    """A simulated node. A pod is a number; its process has the pid 1000 + number."""

    hang_s = 30.0

    def __init__(
        self, fake: FakeNvml, root: Path, gpus: int = 1, *, setup: Sequence[str] = (), **options: object
    ) -> None:
        self.fake = fake
        self.root = root
        root.mkdir(exist_ok=True)
        self.now_ms = T0
        self.start_ms = T0
        self.pods = Assignments()
        self.places: dict[int, tuple[int, str]] = {}
        fake.tell("reset", f"at {T0 * 1_000}")
        for index in range(gpus):
            fake.tell(f"gpu GPU-{index} NVIDIA_H200", f"mem {141 * GIB} {GIB}", "simulate 70000 500000", *setup)
        self.access = Access(**options)  # type: ignore[arg-type]
        self.open_source()
        self.zone = ZoneInfo("UTC")
        self.meter = Meter(60_000, self.zone, boot_id="boot")
        self.closed: list[ClosedSet] = []

    def open_source(self, *, restarted: bool = False) -> None:
        self.gpus = Gpus(Driver(), access=self.access, restarted=restarted, hang_s=self.hang_s)
        self.source = NodeSource(nvml_alone(self.gpus), ProcessTable(self.root), self.pods)  # type: ignore[arg-type]

    @staticmethod
    def uid(pod: int) -> str:
        return f"5f0ce1b2-7a41-4c0e-9d55-{pod:012x}"

    def start(
        self, pod: int, gpu: int, ppm: int, *, of: int = 0, mig: str = "", gi: int = -1, allocate: bool = True
    ) -> None:
        """Start a pod. of: the number of replicas of its time-sliced device; mig, gi: its MIG instance."""
        pid = 1_000 + pod
        add_process(self.root, pid, f"0::/kubepods/pod{self.uid(pod)}/{pod:064x}", "train", start=pod + 1)
        self.places[pod] = gpu, mig
        self.load(pod, ppm, gi)
        if allocate:
            holder = Holder(kind="pod", uid=self.uid(pod), namespace="n", name=f"pod-{pod}", container="main")
            sharing = "time-slicing" if of else None
            self.pods.claims[self.uid(pod)] = Allocation(f"GPU-{gpu}", holder, mig, sharing, of)  # type: ignore[arg-type]

    def load(self, pod: int, ppm: int, gi: int = -1) -> None:
        ci = 0 if gi >= 0 else -1
        self.fake.tell(f"on {self.places[pod][0]}", f"load {1_000 + pod} {ppm} {GIB} {gi} {ci}")

    def kill(self, pod: int) -> None:
        self.fake.tell(f"on {self.places[pod][0]}", f"exit {1_000 + pod}")
        self.pods.claims.pop(self.uid(pod), None)
        folder = self.root / str(1_000 + pod)
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()

    def wait(self, milliseconds: int) -> None:
        """Let time pass without a reading."""
        self.now_ms += milliseconds
        self.fake.tell(f"at {self.now_ms * 1_000}")

    def look(self) -> NodeSnapshot:
        snapshot = self.source.snapshot(self.now_ms)
        self.closed += self.meter.observe(snapshot)
        return snapshot

    def tick(self, milliseconds: int = 1_000) -> NodeSnapshot:
        self.wait(milliseconds)
        return self.look()

    def ticks(self, count: int, milliseconds: int = 1_000) -> None:
        for _ in range(count):
            self.tick(milliseconds)

    def run(self, seconds: int, fault: str = "", during: range = range(20, 30)) -> None:
        """Read the GPUs once a second, then close the rig. fault: a fault of GPU 0 during the seconds in `during`."""
        self.look()
        for second in range(seconds):
            if fault:
                self.fake.tell("clear")
                if second in during:
                    self.fake.tell("on 0", fault)
            self.tick()
        self.close()

    def let_go(self, reason: str = "test") -> None:
        """Release the driver, read once without it a second later, and take it again."""
        self.gpus.release(reason)
        self.tick()
        self.gpus.reacquire(reason)

    def close(self) -> None:
        self.closed += self.meter.flush(self.now_ms)
        self.source.close()

    def rows(self) -> list[UsageInterval]:
        return [row for closed in self.closed for row in closed.rows]

    def rows_of(self, pod: int) -> list[UsageInterval]:
        return [row for row in self.rows() if row.holder and row.holder.uid == self.uid(pod)]

    def metered_us(self, pod: int) -> int:
        """Return the busy time of the pod's rows."""
        return sum(row.busy_us or 0 for row in self.rows_of(pod))

    def truth_us(self, pod: int) -> int:
        """Return the true busy time of the pod's process on its GPU or instance."""
        return self.fake.truth_us(self.places[pod][0], 1_000 + pod)
