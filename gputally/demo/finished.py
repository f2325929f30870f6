"""Serves the ledger of a finished demo again, from a copy, so that the demo's files stay as they are, with the
controller's pages: it runs one cycle over the copy, with the queues as the demo left them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from importlib.resources import as_file
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Console

from accountant.composition import Service
from accountant.core.settings import Settings
from accountant.inventory.inventory_file import MergedInventory
from fairshare.controller.control_loop import Controller
from fairshare.simulator.engine_state import QueueState
from fairshare.usage.accountant_client import AccountantApi
from gputally.base.clock import VirtualClock
from gputally.base.errors import CannotStart
from gputally.demo.accountant_process import PRICE_BOOK, WATCHED, UnreliableWire
from gputally.demo.cluster_and_workload import EXPORTED_LABELS, nodes
from gputally.demo.controller_pages import ControllerPages
from gputally.demo.pipeline import ControlPlane
from gputally.server.https_server import serve
from gputally.server.one_address import OneAddress

_QUEUES = TypeAdapter(dict[str, QueueState])


def serve_finished(folder: Path, port: int, console: Console, wait: Callable[[], object]) -> None:
    """Serve the pages until `wait` returns, with the time at which the ledger ends.

    folder: of a demo's files. Without its summary, only the accountant's pages are served. Raises CannotStart if the
    folder has no ledger with records, and the exceptions of Service."""
    ledger = folder / "ledger.duckdb"
    if not ledger.is_file():
        raise CannotStart(f"{folder} has no ledger of a finished demo: run gputally demo --to {folder}")
    queues = _queues(folder / "summary.json")
    with tempfile.TemporaryDirectory(prefix="gputally-demo-") as copy, as_file(PRICE_BOOK) as book:
        shutil.copyfile(ledger, Path(copy) / ledger.name)
        settings = Settings(
            data=Path(copy), listen=f"127.0.0.1:{port}", auth="off", prices=book, refresh_seconds=3_600,
            exported_labels=EXPORTED_LABELS, kubernetes=WATCHED,
            controller_pages="/" if queues else None,
        )  # fmt: skip
        clock = VirtualClock(0)
        # The ledger has all that the API server of its time told.
        with Service(settings, clock, MergedInventory([])) as service, ExitStack() as controller:
            end_ms = service.ledger.status().extent[1]
            if not end_ms:
                raise CannotStart(f"{ledger} has no records")
            clock.advance_to(end_ms)
            wire = UnreliableWire(service.app)
            with serve(wire, settings.host, settings.port) as url:
                if queues:
                    pages = _controller_pages(queues, Path(copy), url, clock)
                    controller.enter_context(closing(pages))
                    wire.app = OneAddress(service.app, pages.app)
                else:
                    console.print(f"{folder} has no readable summary.json: the controller's pages are left out")
                console.print(f"The pages of {folder} are at [bold]{url}[/bold]   (Ctrl-C ends)", soft_wrap=True)
                wait()


def _queues(summary: Path) -> Mapping[str, QueueState]:
    """Return the queues as the demo left them; {} if its summary does not say it."""
    try:
        return _QUEUES.validate_python(json.loads(summary.read_bytes())["queues"])
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _controller_pages(queues: Mapping[str, QueueState], folder: Path, url: str, clock: VirtualClock) -> ControllerPages:
    """Return the controller's pages after one cycle. Raises the exceptions of AccountantApi."""
    with AccountantApi(url) as client:
        policy = client.policy()
        plane = ControlPlane(nodes(), policy, {name: state.weight for name, state in queues.items()})
        plane.report({queue.name: queues[queue.name] for queue in policy.queues if queue.name in queues})
        pages = ControllerPages(policy, folder, url, clock)
        Controller(policy, client, plane.cluster, clock, observe=pages.show).cycle()
    return pages
