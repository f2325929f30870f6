"""Serves the policy's form, preview and file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from starlette.responses import JSONResponse, Response

from accountant.wire.policy_models import Policy, QueuePolicy
from fairshare.controller.policy_file import PolicyFileChanged, PolicyNotWritten, digest, loaded
from fairshare.core.queue_tree import PolicyTree
from fairshare.explain.what_if_replay import Comparison
from fairshare.laws.weight_calculation import static_parts
from fairshare.web import policy_form, queue_pages
from fairshare.web.page_authentication import Refusal
from fairshare.web.page_routing import Page, PagesApp, RequestContext, link, redirect
from fairshare.web.policy_form import GROUPS, QUEUE, Draft, Finding, Form, PolicyText
from fairshare.web.svg_plots import Line, bullet, over_time
from fairshare.web.what_if_worker import MOST_DAYS, Busy, PreviewOrder
from gputally.base.units import MS_PER_DAY
from gputally.base.yaml_file import FileFault, parse

PREVIEW_DAYS = (3, 7, 14, 30)
YAML = "application/yaml; charset=utf-8"
_FALLBACK_GPUS = 100.0
"""Number of GPUs assumed for a cluster of unknown size."""


def form(visit: RequestContext) -> Response:
    """`/policy`: the present file, in fields."""
    standing = _standing(visit.site)
    return _form_page(visit, standing, policy_form.form_of(standing), None)


def submit(visit: RequestContext) -> Response:
    """POST `/policy`: the result of the form. Without scripts it is also checked here, and rows are added."""
    standing = _standing(visit.site)
    sent = _sent(visit)
    action = visit.sent("action")
    if action == "add":
        return _form_page(visit, standing, policy_form.with_new_row(sent), None)
    found = _draft(visit.site, standing, sent)
    if action != "review" or not found.sound:
        return _form_page(visit, standing, sent, found, status=200 if found.sound else 422)
    return _review_page(visit, standing, found, visit.sent("base"))


def check(visit: RequestContext) -> Response:
    """POST `/policy/check`: the same for the script, as JSON."""
    found = _draft(visit.site, _standing(visit.site), _sent(visit))
    return JSONResponse(
        {
            "sound": found.sound,
            "faults": _findings_json(found.faults),
            "advice": _findings_json(found.advice),
            "parts": _parts_html(visit.site, found.policy),
        }
    )


def _findings_json(findings: Sequence[Finding]) -> list[dict[str, str]]:
    return [
        {"field": each.field, "place": each.place, "text": each.beside, "sentence": each.sentence} for each in findings
    ]


def file(visit: RequestContext) -> Response:
    """POST `/policy/file`: the file to commit."""
    text, _ = _text(visit)
    name = (
        "".join(letter for letter in visit.context.place.name if letter.isalnum() or letter in "._-") or "policy.yaml"
    )
    return Response(text, media_type=YAML, headers={"Content-Disposition": f'attachment; filename="{name}"'})


def preview(visit: RequestContext) -> Response:
    """POST `/policy/preview`: replay the last days; redirects to the preview's page."""
    text, policy = _text(visit)
    days = visit.sent("days")
    if not days.isascii() or not days.isdigit() or not 1 <= int(days) <= MOST_DAYS:
        raise Refusal(422, "How many days?", f"a preview looks back 1 to {MOST_DAYS} days")
    order = PreviewOrder(visit.site.snapshot().policy, policy, int(days), visit.context.clock.wall_ms())
    try:
        key = visit.context.previews.start(order, text, edited=visit.sent("edited") != "no")
    except Busy as busy:
        running = visit.context.previews.running()
        raise Refusal(409, "One at a time", f"{busy}: {link('/preview/', running)}" if running else str(busy)) from busy
    return redirect(link("/preview/", key))


def preview_page(visit: RequestContext) -> Response:
    """`/preview/KEY`: the progress, then the result."""
    key, _, more = visit.rest.partition("/")
    found = visit.context.previews.get(key)
    if found is None:
        raise Refusal(404, "No such preview", "this replica does not know it: it was made on another, or is forgotten")
    if more == "state":
        return JSONResponse({"state": found.state, "part": round(found.part, 3), "doing": found.doing})
    if more:
        raise Refusal(404, "No such page", "there is nothing at this address")
    standing = _standing(visit.site)
    return visit.page(
        "preview.html", "/policy", key=key, preview=found, plots=_plots(found.result) if found.result else (),
        lines=policy_form.difference(standing.text, found.text, standing.name), base=digest(standing.text),
        days=PREVIEW_DAYS,
    )  # fmt: skip


def cancel(visit: RequestContext) -> Response:
    """POST `/preview/KEY`: stop it."""
    visit.context.previews.cancel(visit.rest)
    return redirect(link("/preview/", visit.rest))


def apply(visit: RequestContext) -> Response:
    """POST `/policy/apply`: write the file, if the operator allows it and it has not changed meanwhile."""
    text, policy = _text(visit)
    if not visit.context.place.writable:
        raise Refusal(403, "Not allowed here", "the pages may not write the policy: commit the file instead")
    before = _version(visit.site)
    try:
        visit.context.place.write(text, visit.sent("base"))
    except PolicyFileChanged as error:
        raise Refusal(409, "Changed meanwhile", str(error)) from error
    except PolicyNotWritten as error:
        raise Refusal(500, "The policy could not be written", str(error)) from error
    visit.context.applied(visit.caller.principal.name, before, policy.version())
    return visit.page("applied.html", "/policy", before=before, version=policy.version())


def _standing(site: PagesApp) -> PolicyText:
    try:
        text = site.context.place.read()
        return PolicyText.of(text, site.context.place.name)
    except (PolicyNotWritten, FileFault) as error:
        raise Refusal(503, "The policy file cannot be read", str(error)) from error


def _version(site: PagesApp) -> str:
    """Return the version of the present file; "faulty" if it is not a valid policy."""
    try:
        return loaded(parse(site.context.place.read(), site.context.place.name)).version()
    except (PolicyNotWritten, FileFault):
        return "faulty"


def _sent(visit: RequestContext) -> Form:
    try:
        return policy_form.form_from(visit.form)
    except ValueError as error:
        raise Refusal(400, "Not a form of this site", str(error)) from error


def _draft(site: PagesApp, standing: PolicyText, sent: Form) -> Draft:
    snapshot = site.context.scene.now()
    try:
        return policy_form.draft(standing, sent, snapshot.gpus if snapshot is not None else None)
    except ValueError as error:
        raise Refusal(409, "The file has changed", str(error)) from error


def _text(visit: RequestContext) -> tuple[str, Policy]:
    """Return the whole file, which later steps of the form carry along."""
    text = visit.sent("text").replace("\r\n", "\n")
    try:
        return text, loaded(parse(text, visit.context.place.name))
    except FileFault as fault:
        raise Refusal(422, "This policy is faulty", str(fault)) from fault


def _form_page(
    visit: RequestContext, standing: PolicyText, shown: Form, found: Draft | None, status: int = 200
) -> Response:
    if found is None:
        found = _draft(visit.site, standing, shown)
    beside: dict[str, list[tuple[str, str]]] = {}
    for kind, findings in (("fault", found.faults), ("advice", found.advice)):
        for each in findings:
            beside.setdefault(each.field, []).append((kind, each.beside))
    return visit.page(
        "policy.html", "/policy", status, standing=standing, form=shown, draft=found, beside=beside,
        groups=GROUPS, columns=QUEUE, base=digest(standing.text), names=policy_form.names(shown), policy_model=Policy,
        queue_model=QueuePolicy, parts=_parts_html(visit.site, found.policy), may=visit.caller.may("policy"),
    )  # fmt: skip


def _review_page(visit: RequestContext, standing: PolicyText, found: Draft, base: str) -> Response:
    assert found.policy is not None
    try:
        before: Policy | None = loaded(parse(standing.text, standing.name))
    except FileFault:
        before = None
    return visit.page(
        "review.html", "/policy", standing=standing, draft=found, base=base or digest(standing.text),
        changes=policy_form.changes(before, found.policy) if before is not None else (),
        lines=policy_form.difference(standing.text, found.text, standing.name), days=PREVIEW_DAYS,
        version=found.policy.version(), before=before.version() if before is not None else "faulty",
    )  # fmt: skip


def _parts_html(site: PagesApp, policy: Policy | None) -> str:
    """Return the entitlements from quotas and weights under a draft, as a list to be put into the page."""
    if policy is None:
        return ""
    snapshot = site.context.scene.now()
    gpus = (snapshot.gpus if snapshot is not None else None) or _FALLBACK_GPUS
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
    return f'<ul class="parts">{"".join(items)}</ul>'


def _plots(result: Comparison) -> list[dict[str, Any]]:
    """Return one chart per queue, the largest first."""
    order = sorted(result.rows, key=lambda row: -max(row.then.gpu_hours, row.now.gpu_hours))
    return [
        {
            "row": row,
            "svg": over_time(
                f"{row.queue}: mean GPUs a day",
                [
                    Line("held", "as it was", _at(result, row.queue, "had"), area=True),
                    Line("now", "present policy, replayed", _at(result, row.queue, "now")),
                    Line("then", "draft, replayed", _at(result, row.queue, "then")),
                ],
                result.start_ms,
                result.end_ms,
                height=170,
            ),
        }
        for row in order[:12]
    ]


def _at(result: Comparison, queue: str, case: str) -> list[tuple[float, float]]:
    """Each day's mean at the day's middle."""
    return [
        (result.start_ms + (day - 0.5) * MS_PER_DAY, value) for day, value in result.series[queue][case] if day >= 1
    ]


ROUTES = (
    Page("GET", "/", "read", queue_pages.shares, for_teams=True),
    Page("GET", "/queue/", "read", queue_pages.queue, for_teams=True),
    Page("GET", "/decisions", "read", queue_pages.decisions),
    Page("GET", "/decision", "read", queue_pages.decision),
    Page("GET", "/policy", "read", form),
    Page("GET", "/preview/", "read", preview_page),
    Page("POST", "/policy", "policy", submit),
    Page("POST", "/policy/check", "policy", check),
    Page("POST", "/policy/file", "policy", file),
    Page("POST", "/policy/preview", "policy", preview),
    Page("POST", "/policy/apply", "policy", apply),
    Page("POST", "/preview/", "policy", cancel),
)
"""The routes of all pages of the controller."""
