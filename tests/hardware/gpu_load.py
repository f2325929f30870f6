"""Loads GPU 0 in a known pattern: `gpu_load.py SECONDS [--busy PERCENT] [--period MS] [--multiprocessors N]`.

The kernel spins for a fixed time, so the load is exact while one process alone uses the GPU. Processes that are busy at
the same moment share the GPU in turns. At the end the program prints one JSON line with its pid and the time of its
kernels in milliseconds. With --fault it writes to an address that was never allocated, for which the driver reports an
Xid."""

from __future__ import annotations

import argparse
import json
import os
import time

from agent.commands import gpu_load_check
from agent.commands.gpu_load_check import Cuda, CudaFault

_FULL = 100
_CHUNK_MS = 200
_FAULTY_KERNEL = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry spin(.param .u64 nanoseconds)
{
    .reg .b64 %address;
    .reg .b32 %value;
    mov.u64 %address, 4096;
    mov.u32 %value, 1;
    st.global.u32 [%address], %value;
    ret;
}
\0"""


def main() -> None:
    """Run the load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--busy", type=int, default=_FULL, metavar="PERCENT")
    parser.add_argument("--period", type=int, default=1_000, metavar="MS")
    parser.add_argument("--multiprocessors", type=int, default=0, metavar="N")
    parser.add_argument("--memory", type=int, default=64, metavar="MIB")
    parser.add_argument("--fault", action="store_true")
    chosen = parser.parse_args()
    if chosen.fault:
        gpu_load_check._KERNEL = _FAULTY_KERNEL
    with Cuda() as cuda:
        if chosen.multiprocessors:
            cuda._blocks = chosen.multiprocessors
        cuda.allocate(chosen.memory << 20)
        try:
            kernel_ms = _spin(cuda, chosen.seconds, chosen.busy, chosen.period)
        except CudaFault as fault:
            print(json.dumps({"pid": os.getpid(), "fault": str(fault)}), flush=True)
            return
    print(json.dumps({"pid": os.getpid(), "kernel_ms": kernel_ms}), flush=True)


def _spin(cuda: Cuda, seconds: float, busy: int, period_ms: int) -> int:
    began = time.monotonic()
    kernel_ms = turns = 0
    while time.monotonic() - began < seconds:
        chunk_ms = _CHUNK_MS if busy >= _FULL else period_ms * busy // _FULL
        for _ in range(2 if busy >= _FULL else 1):  # the second starts without a pause after the first
            cuda.spin(chunk_ms)
            kernel_ms += chunk_ms
        cuda.finish()
        turns += 1
        if busy < _FULL:
            time.sleep(max(began + turns * period_ms / 1_000 - time.monotonic(), 0))
    return kernel_ms


if __name__ == "__main__":
    main()
