"""Runs real programs for a test: free loopback ports, a process with its log, and a wait until it is ready."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.deadlines import Deadline

SCRIPTS = Path(__file__).parents[2] / "scripts"
READY_SECONDS = 60
SHORT_LIVED_JAVA = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
"""Options of Java for programs that end after minutes: optimizing their code takes more time than it saves."""


def built(script: str) -> Path:
    """Return the folder that scripts/`script` prints, building it if it is missing. Raises RuntimeError with the
    script's last output."""
    done = subprocess.run(["sh", str(SCRIPTS / script)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{script} failed:\n{done.stderr[-2000:]}")
    return Path(done.stdout.strip())


def free_ports(count: int) -> list[int]:
    """Return free ports below those that the system gives to outgoing connections, because one of those could be taken
    before the program under test listens on it."""
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.SystemRandom().sample(range(20_000, 32_000), 12_000):
            if len(found) == count:
                break
            one = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("0.0.0.0", port))
                found.append(port)
    return found


@contextlib.contextmanager
def running(
    command: list[str], log: Path, environment: Mapping[str, str] | None = None, user: str | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process until the block ends, with its output in `log`. It is terminated, then killed. environment: in
    place of this process's."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent, env=environment, user=user
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path, headers: Mapping[str, str] | None = None) -> None:
    """Request `url` until the status is 200. Raises RuntimeError with the end of the log if that never happens."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    request = urllib.request.Request(url, headers=dict(headers or {}))

    def answers() -> bool:
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(request, timeout=2, context=context) as answer,
        ):
            return bool(answer.status == 200)
        return False

    wait_until(answers, url, process, log)


def wait_until(ready: Callable[[], bool], what: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until `ready()` is true. Raises RuntimeError with `what` and the end of the log otherwise."""
    deadline = Deadline(READY_SECONDS)
    while not deadline.passed:
        if ready():
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)  # the pause between two looks, cut short when the program dies
            raise RuntimeError(f"{process.args!r} ended:\n{log.read_text(errors='replace')[-2000:]}")
    raise RuntimeError(f"{what} is not ready:\n{log.read_text(errors='replace')[-2000:]}")
