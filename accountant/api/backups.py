"""/v1/backups: make one, list them, fetch one. And how far the archive is."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import FileResponse

from accountant import backups
from accountant.api.access import Administering
from accountant.api.deps import Given
from accountant.api.openapi import answers, refuses
from accountant.api.problems import Refusal
from accountant.backups import Backup, NoBackup

router = APIRouter(tags=["operation"])
MEDIA_TYPE = "application/vnd.duckdb"
Name = Annotated[str, Path(pattern=r"^ledger-[0-9TZ]{1,40}$", description="Name of a backup.")]


@router.post("/v1/backups", summary="Copy the ledger, verified", responses=refuses("ledger-unavailable"))
async def make(deps: Given, _: Administering) -> Backup:
    """Into the configured folder (`backups.to`), while the ledger goes on being written; beyond `backups.keep` the
    oldest go."""

    def one_more() -> Backup:
        made = backups.make(deps.ledger, deps.settings.backup_folder, deps.clock.wall_ms())
        backups.prune(deps.settings.backup_folder, deps.settings.backups.keep)
        return made

    return await asyncio.to_thread(one_more)


@router.get("/v1/backups", summary="Backups, newest first", responses=refuses("ledger-unavailable"))
async def known(deps: Given, _: Administering) -> list[Backup]:
    return await asyncio.to_thread(backups.known, deps.settings.backup_folder)


@router.get(
    "/v1/backups/{name}",
    summary="A backup as a file",
    response_class=FileResponse,
    responses={**answers("A DuckDB file", MEDIA_TYPE), **refuses("not-found")},
)
async def fetch(name: Name, deps: Given, _: Administering) -> FileResponse:
    try:
        place = await asyncio.to_thread(backups.file_of, deps.settings.backup_folder, name)
    except NoBackup as error:
        raise Refusal("not-found", f"no backup {name!r}") from error
    return FileResponse(place, media_type=MEDIA_TYPE, filename=place.name)
