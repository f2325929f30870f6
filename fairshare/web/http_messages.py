"""Defines how the controller's pages refuse a request, and reads their forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.requests import Request

from gputally.server.request_handling import read_body

Fields = Mapping[str, Sequence[str]]
"""Every value of every field of a form, as sent."""
MOST_BYTES = 2 * 1024 * 1024
"""Of a form: a policy of two thousand queues is half of it."""
MOST_FIELDS = 25_000
BODY_S = 10.0
_FORM = "application/x-www-form-urlencoded"


class Refusal(HTTPException):
    """A request is refused. The message says why and is sent to the caller."""

    def __init__(self, status: int, title: str, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, detail, dict(headers or {}))
        self.title = title


def refusal(error: HTTPException) -> Refusal:
    """What the framework refuses, in the words of the pages."""
    if isinstance(error, Refusal):
        return error
    title, detail = {
        404: ("No such page", "there is nothing at this address"),
        405: ("Not like that", "this address takes no such request"),
    }.get(error.status_code, (HTTPStatus(error.status_code).phrase, error.detail))
    return Refusal(error.status_code, title, detail, error.headers)


async def read_form(request: Request) -> Fields:
    """Raises HTTPException for a body that is too large, too slow or no form."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM:
        raise HTTPException(415, f"forms are {_FORM}")
    content = await read_body(request, MOST_BYTES, BODY_S)
    try:
        return parse_qs(content.decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS)
    except ValueError as error:
        raise HTTPException(400, "not a form, or one with too many fields") from error


def sent(form: Fields, name: str) -> str:
    """The first value of a form's field, as it was sent."""
    return (form.get(name) or ("",))[0]
