"""Answers that are not sent again to a reader who has them (RFC 9110, conditional requests)."""

from __future__ import annotations

import hashlib

from fastapi import Request, Response


def tagged(request: Request, body: bytes, media_type: str, file: str = "") -> Response:
    """200 with an ETag of the content, or 304 where the client has it already.

    file: the name that a browser keeps it under (`accountant.reports.names`); "": it is shown."""
    tag = f'"{hashlib.sha256(body).hexdigest()}"'
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    if file:
        headers["Content-Disposition"] = f'attachment; filename="{file}"'
    known = {part.strip().removeprefix("W/") for part in request.headers.get("if-none-match", "").split(",")}
    if tag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=media_type)
