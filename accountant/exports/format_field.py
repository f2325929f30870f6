"""The name of an installed format, as a field of HTTP parameters and settings."""

from __future__ import annotations

import contextlib
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from accountant.exports.format_names import Format
from accountant.exports.protocol import SEAM, ExportPlugin
from gputally.base.plugins import BrokenPlugin, NoPlugin, named


def _not_broken(name: object) -> object:
    """The name. Raises ValueError, with the reason, if it is that of an export that cannot be used."""
    with contextlib.suppress(NoPlugin):  # the type says which names there are
        try:
            named(SEAM, ExportPlugin, str(name))
        except BrokenPlugin as error:
            raise ValueError(str(error)) from error
    return name


def _known(name: str) -> str:
    try:
        named(SEAM, ExportPlugin, name)
    except BrokenPlugin:
        pass
    except NoPlugin as error:
        raise ValueError(str(error)) from error
    return name


OrderedFormat = Annotated[str, AfterValidator(_known)]
"""The name of a format for files that are written later, also of one that cannot be used at present."""
FormatField = Annotated[Format, BeforeValidator(_not_broken)]
