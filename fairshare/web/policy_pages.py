"""Serves the policy's form, previews and file, applies a changed policy, and lists the routes of all pages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any

from starlette.responses import JSONResponse, Response

from accountant.wire.policy_models import Policy, QueuePolicy
from fairshare.controller import policy_difference
from fairshare.controller.policy_file import PolicyFileChanged, PolicyNotWritten, digest, policy_of_document
from fairshare.core.queues_and_weights import PolicyTree
from fairshare.explain import conclusions
from fairshare.explain.what_if_simulation import Comparison
from fairshare.laws.weight_calculation import static_parts
from fairshare.web import policy_form, queue_pages
from fairshare.web.page_authentication import PageRefusal
from fairshare.web.page_routing import PageRoute, PagesApp, RequestContext, link, redirect
from fairshare.web.policy_form import QUEUE, Draft, Form, FormFinding, PolicyText
from fairshare.web.svg_plots import PlotLine, bullet, over_time
from fairshare.web.what_if_worker import MOST_DAYS, PreviewOrder, PreviewRunning
from gputally.base.units import MS_PER_DAY
from gputally.base.yaml_file import FileFault, parse

PREVIEW_DAYS = (3, 7, 14, 30)
YAML = "application/yaml; charset=utf-8"
_FALLBACK_GPUS = 100.0
"""The number of GPUs that the form assumes for a cluster of unknown size."""


def form(request: RequestContext) -> Response:
    """Answer `/policy`: the present file as a form."""
    standing = _standing(request.app)
    return _form_page(request, standing, policy_form.form_of(standing), None)


def submit(request: RequestContext) -> Response:
    """Answer POST `/policy`: the checked form, the form with one more row, or the review of the change."""
    standing = _standing(request.app)
    form = _sent_form(request)
    action = request.field("action")
    if action == "add":
        return _form_page(request, standing, policy_form.with_new_row(form), None)
    draft = _draft(request.app, standing, form)
    if action != "review" or not draft.sound:
        return _form_page(request, standing, form, draft, status=200 if draft.sound else 422)
    return _review_page(request, standing, draft, request.field("base"))


def check(request: RequestContext) -> Response:
    """Answer POST `/shares/policy/check`: the faults and the advice of the form as JSON, for the page's script."""
    draft = _draft(request.app, _standing(request.app), _sent_form(request))
    return JSONResponse(
        {
            "sound": draft.sound,
            "edited": draft.edited,
            "faults": _findings_json(draft.faults),
            "advice": _findings_json(draft.advice),
            "parts": _parts_html(request.app, draft.policy),
        }
    )


def _findings_json(findings: Sequence[FormFinding]) -> list[dict[str, str]]:
    return [
        {"field": each.field, "place": each.place, "text": each.beside, "sentence": each.sentence} for each in findings
    ]


def file(request: RequestContext) -> Response:
    """Answer POST `/policy/file`: the changed file, for a commit."""
    text, _ = _sent_policy(request)
    name = re.sub(r"[^\w.-]", "", request.context.location.name) or "policy.yaml"
    return Response(text, media_type=YAML, headers={"Content-Disposition": f'attachment; filename="{name}"'})


def preview(request: RequestContext) -> Response:
    """Answer POST `/policy/preview`: start a replay of the last days, and redirect to its page."""
    text, policy = _sent_policy(request)
    days = request.field("days")
    if not days.isascii() or not days.isdigit() or not 1 <= int(days) <= MOST_DAYS:
        raise PageRefusal(422, "How many days?", f"choose 1 to {MOST_DAYS} days for the preview")
    order = PreviewOrder(request.app.snapshot().policy, policy, int(days), request.context.clock.wall_ms())
    try:
        key = request.context.previews.start(order, text, edited=request.field("edited") != "no")
    except PreviewRunning as busy:
        running = request.context.previews.running()
        raise PageRefusal(
            409, "One at a time", f"{busy}: {link('/shares/preview/', running)}" if running else str(busy)
        ) from busy
    return redirect(link("/shares/preview/", key))


def preview_page(request: RequestContext) -> Response:
    """Answer `/preview/KEY`: the preview's progress, then its result. `/preview/KEY/state`: the progress as JSON."""
    key, _, more = request.rest.partition("/")
    preview = request.context.previews.get(key)
    if preview is None:
        raise PageRefusal(
            404, "No such preview", "another replica made this preview, or newer previews replaced it: start a new one"
        )
    if more == "state":
        return JSONResponse({"state": preview.state, "part": round(preview.part, 3), "doing": preview.doing})
    if more:
        raise PageRefusal(404, "No such page", "there is no page at this address")
    standing = _standing(request.app)
    return request.page(
        "preview.html", "/shares/policy", key=key, preview=preview,
        plots=_plots(preview.result) if preview.result else (),
        conclusions=conclusions.of_replay(preview.result) if preview.result else (), base=digest(standing.text),
        lines=policy_form.difference(standing.text, preview.text, standing.name),
    )  # fmt: skip


def cancel(request: RequestContext) -> Response:
    """Answer POST `/preview/KEY`: stop the preview, and redirect to its page."""
    request.context.previews.cancel(request.rest)
    return redirect(link("/shares/preview/", request.rest))


def apply(request: RequestContext) -> Response:
    """Answer POST `/policy/apply`: write the file, if the operator allows it and the file is unchanged."""
    text, policy = _sent_policy(request)
    if not request.context.location.writable:
        raise PageRefusal(403, "Not allowed here", "the pages may not write the policy: commit the file instead")
    before = _in_file(request.app)
    try:
        request.context.location.write(text, request.field("base"))
    except PolicyFileChanged as error:
        raise PageRefusal(409, "Changed meanwhile", str(error)) from error
    except PolicyNotWritten as error:
        raise PageRefusal(500, "The policy could not be written", str(error)) from error
    version = before.version() if before is not None else "faulty"
    request.context.applied(request.caller.principal.name, before, policy, request.field("reason").strip()[:1_000])
    return request.page("applied.html", "/shares/policy", before=version, version=policy.version())


def _standing(app: PagesApp) -> PolicyText:
    """Return the present policy file. Raises PageRefusal."""
    try:
        text = app.context.location.read()
        return PolicyText.of(text, app.context.location.name)
    except (PolicyNotWritten, FileFault) as error:
        raise PageRefusal(503, "The policy file cannot be read", str(error)) from error


def _in_file(app: PagesApp) -> Policy | None:
    """Return the policy in the present file; None if it is not a valid policy."""
    try:
        return policy_of_document(parse(app.context.location.read(), app.context.location.name))
    except (PolicyNotWritten, FileFault):
        return None


def _sent_form(request: RequestContext) -> Form:
    try:
        return policy_form.form_from(request.form)
    except ValueError as error:
        raise PageRefusal(400, "Not a valid form", str(error)) from error


def _draft(app: PagesApp, standing: PolicyText, form: Form) -> Draft:
    snapshot = app.context.reports.now()
    try:
        return policy_form.draft(standing, form, snapshot.gpus if snapshot is not None else None)
    except ValueError as error:
        raise PageRefusal(409, "The file has changed", str(error)) from error


def _sent_policy(request: RequestContext) -> tuple[str, Policy]:
    """Return the policy file that the review and the preview send back in a hidden field. Raises PageRefusal."""
    text = request.field("text").replace("\r\n", "\n")
    try:
        return text, policy_of_document(parse(text, request.context.location.name))
    except FileFault as fault:
        raise PageRefusal(422, "This policy is faulty", str(fault)) from fault


def _form_page(
    request: RequestContext, standing: PolicyText, form: Form, draft: Draft | None, status: int = 200
) -> Response:
    if draft is None:
        draft = _draft(request.app, standing, form)
    beside: dict[str, list[tuple[str, str]]] = {}
    for kind, findings in (("fault", draft.faults), ("advice", draft.advice)):
        for each in findings:
            beside.setdefault(each.field, []).append((kind, each.beside))
    return request.page(
        "policy.html", "/shares/policy", status, form=form, draft=draft, beside=beside, groups=policy_form.groups(),
        columns=QUEUE, base=digest(standing.text), names=policy_form.names(form), policy_model=Policy,
        queue_model=QueuePolicy, parts=_parts_html(request.app, draft.policy), may=request.caller.may("policy"),
    )  # fmt: skip


def _review_page(request: RequestContext, standing: PolicyText, draft: Draft, base: str) -> Response:
    assert draft.policy is not None
    try:
        before: Policy | None = policy_of_document(parse(standing.text, standing.name))
    except FileFault:
        before = None
    return request.page(
        "review.html", "/shares/policy", draft=draft, base=base or digest(standing.text),
        changes=policy_difference.changes(before, draft.policy) if before is not None else (),
        lines=policy_form.difference(standing.text, draft.text, standing.name), days=PREVIEW_DAYS,
        version=draft.policy.version(), before=before.version() if before is not None else "faulty",
    )  # fmt: skip


def _parts_html(app: PagesApp, policy: Policy | None) -> str:
    """Return the entitlements by quotas and weights under a draft as an HTML list; "" for an invalid draft."""
    if policy is None:
        return ""
    snapshot = app.context.reports.now()
    known = (snapshot.gpus if snapshot is not None else None) or 0.0
    gpus = known or _FALLBACK_GPUS
    of = (
        f"Of the {known:,.1f} GPUs that are there now:"
        if known
        else f"The number of GPUs is not known; of {gpus:,.0f}:"
    )
    parts = static_parts(policy, gpus)
    used = {
        queue.name: queue_pages.used_part(snapshot.report.window, queue.name) if snapshot is not None else None
        for queue in policy.queues
    }
    top = min(1.0, max([0.05, *parts.values(), *(value or 0.0 for value in used.values())]) * 1.08)
    items = [
        f'<li class="d{min(depth, 6)}"><span>{escape(queue.name)}</span>'
        f"{bullet(queue.name, used[queue.name], parts[queue.name], top)}"
        f"<b>{parts[queue.name]:.1%}</b><small>{parts[queue.name] * gpus:,.1f} GPUs</small></li>"
        for depth, queue in PolicyTree(policy).downwards()
    ]
    return f'<p class="lead">{of}</p><ul class="parts">{"".join(items)}</ul>'


def _plots(result: Comparison) -> list[dict[str, Any]]:
    """Return one chart for each of the twelve largest queues, largest first."""
    order = sorted(result.rows, key=lambda row: -max(row.then.gpu_hours, row.now.gpu_hours))
    return [
        {
            "row": row,
            "svg": over_time(
                f"{row.queue}: mean GPUs a day",
                [
                    PlotLine("held", "as it was", _daily_means(result, row.queue, "had"), area=True),
                    PlotLine("now", "present policy, replayed", _daily_means(result, row.queue, "now")),
                    PlotLine("then", "draft, replayed", _daily_means(result, row.queue, "then")),
                ],
                result.start_ms,
                result.end_ms,
                height=170,
            ),
        }
        for row in order[:12]
    ]


def _daily_means(result: Comparison, queue: str, case: str) -> list[tuple[float, float]]:
    """Return (middle of the day in milliseconds UTC, mean GPUs of the queue) for each whole day.

    case: a key of `Comparison.series`: had, now or then."""
    return [
        (result.start_ms + (day - 0.5) * MS_PER_DAY, value) for day, value in result.series[queue][case] if day >= 1
    ]


ROUTES = (
    PageRoute("GET", "/shares", "read", queue_pages.shares, for_teams=True),
    PageRoute("GET", "/shares/shares.csv", "read", queue_pages.shares_file, for_teams=True),
    PageRoute("GET", "/shares/queue/", "read", queue_pages.queue, for_teams=True),
    PageRoute("GET", "/shares/decisions", "read", queue_pages.decisions),
    PageRoute("GET", "/shares/decision", "read", queue_pages.decision),
    PageRoute("GET", "/shares/policy", "read", form),
    PageRoute("GET", "/shares/preview/", "read", preview_page),
    PageRoute("POST", "/shares/policy", "policy", submit),
    PageRoute("POST", "/shares/policy/check", "policy", check),
    PageRoute("POST", "/shares/policy/file", "policy", file),
    PageRoute("POST", "/shares/policy/preview", "policy", preview),
    PageRoute("POST", "/shares/policy/apply", "policy", apply),
    PageRoute("POST", "/shares/preview/", "policy", cancel),
)
"""The routes of all pages of the controller."""
