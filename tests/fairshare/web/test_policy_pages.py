"""The policy form: the resulting file, its refusals, and previews."""

from __future__ import annotations

import json
import re
import threading
from html import unescape
from pathlib import Path

import pytest
import structlog

from fairshare.controller import policy_file as policies
from fairshare.controller.policy_file import digest
from fairshare.explain.what_if_simulation import Comparison
from fairshare.web.what_if_worker import Cancelled, PreviewOrder, ProgressCallback
from gputally.base.yaml_file import parse
from gputally.server.sign_in import FORM_TOKEN
from tests.fairshare.web.controller_pages import Stage, quick, settled, stage, text


def filled(here: Stage, **values: str) -> dict[str, str]:
    """Return the form as a browser would send it, with `queues__1__weight` and the like."""
    page = here.get("/shares/policy").body.decode()
    form = {}
    for tag in re.findall(r"<input[^>]*>", page):
        fields = dict(re.findall(r'([a-z]+)="([^"]*)"', tag))
        if fields.get("type") != "checkbox":
            form[fields["name"]] = unescape(fields.get("value", ""))
    for name, options in re.findall(r'<select id="[^"]*" name="([^"]*)".*?>(.*?)</select>', page, re.DOTALL):
        chosen = re.search(r'<option value="([^"]*)" selected', options)
        form[name] = chosen[1] if chosen else ""
    for name, value in re.findall(r'<textarea id="[^"]*" name="([^"]*)".*?>(.*?)</textarea>', page, re.DOTALL):
        form[name] = unescape(value).replace("\n", "\r\n")  # as browsers send it
    form.pop(FORM_TOKEN)
    return form | {key.replace("__", "."): value for key, value in values.items()}


def test_the_form_as_it_stands_is_the_file(open_stage: Stage) -> None:
    found = text(open_stage.post("/shares/policy", filled(open_stage, action="review")))
    assert "Nothing: both files are the same policy." in found
    assert "The file stays as it is." in found


def test_a_fault_comes_back_beside_its_field(open_stage: Stage) -> None:
    form = filled(open_stage, queues__1__weight="-3", action="review")
    found = open_stage.post("/shares/policy", form)
    assert found.status == 422
    assert '<p class="beside" id="b-queues.1.weight"' in text(found)
    assert "must be at least 0</span></p>" in text(found)
    assert 'name="queues.1.weight" value="-3"' in text(found)
    assert 'aria-invalid="true"' in text(found)


def test_the_scripts_check_says_the_same(open_stage: Stage) -> None:
    told = json.loads(open_stage.post("/shares/policy/check", filled(open_stage, k="x")).body)
    assert (told["sound"], [each["field"] for each in told["faults"]]) == (False, ["k"])
    told = json.loads(open_stage.post("/shares/policy/check", filled(open_stage, measure="busy")).body)
    assert told["sound"]
    assert told["edited"], "its comments stay"
    assert [each["field"] for each in told["advice"]] == ["measure"]
    starving = {"queues.1.deserved": "0", "queues.1.weight": "0", "queues.1.limit": "0"}
    told = json.loads(open_stage.post("/shares/policy/check", filled(open_stage) | starving).body)
    assert "queues.1.limit" in [each["field"] for each in told["advice"]]
    assert "<svg" in told["parts"]


def test_a_row_is_added_without_scripts(open_stage: Stage) -> None:
    found = text(open_stage.post("/shares/policy", filled(open_stage, action="add")))
    assert 'name="queues.6.name"' in found


@pytest.mark.parametrize(
    ("url", "form", "status"),
    [
        ("/shares/policy", {"queues.0.at": "x"}, 400),
        ("/shares/policy", {"queues.0.at": "77", "queues.0.name": "a"}, 409),
        ("/shares/policy/file", {"text": "queues: ["}, 422),
        ("/shares/policy/file", {"text": "queues: []"}, 422),
        ("/shares/policy/preview", {"text": "queues: [{name: a}]", "days": "365"}, 422),
    ],
)
def test_forms_that_are_none_of_ours(open_stage: Stage, url: str, form: dict[str, str], status: int) -> None:
    assert open_stage.post(url, form).status == status


def test_the_file_comes_as_it_was_reviewed(open_stage: Stage) -> None:
    sent = open_stage.file.read_text().replace("k: 1.0", "k: 3.0").replace("\n", "\r\n")  # as browsers send it
    found = open_stage.post("/shares/policy/file", {"text": sent})
    assert found.body.decode() == sent.replace("\r\n", "\n")
    assert found.headers["Content-Disposition"] == 'attachment; filename="policy.yaml"'


def test_nothing_is_applied_unless_the_settings_allow_it(open_stage: Stage) -> None:
    before = open_stage.file.read_text()
    page = text(open_stage.post("/shares/policy", filled(open_stage, k="3", action="review")))
    assert "Apply it now" not in page
    assert "the operator has not set pages_apply" in page.replace("<code>", "").replace("</code>", "")
    assert open_stage.post("/shares/policy/apply", {"text": before + "\n", "base": digest(before)}).status == 403
    assert open_stage.file.read_text() == before


def test_it_is_applied_once_confirmed_and_never_over_another_change(tmp_path: Path) -> None:
    here = stage(tmp_path, writable=True, cycles=1)
    here.file.chmod(0o640)
    before = here.file.read_text()
    after = before.replace("k: 1.0", "k: 3.0")
    form = {"text": after, "base": digest(before), "reason": " the quarter began "}
    assert here.post("/shares/policy/apply", form).status == 200
    assert here.file.read_text() == after
    assert here.file.stat().st_mode & 0o777 == 0o640
    both = [policies.policy_of_document(parse(each, "x")) for each in (before, after)]
    assert here.applied == [("anonymous", *both, "the quarter began")]
    assert list(tmp_path.glob(".policy*")) == []
    assert here.post("/shares/policy/apply", form).status == 409
    assert here.post("/shares/policy/apply", {**form, "text": "queues: 7"}).status == 422
    assert here.file.read_text() == after


def test_a_file_that_went_away_is_said(tmp_path: Path) -> None:
    here = stage(tmp_path, cycles=1)
    here.file.unlink()
    assert here.get("/shares/policy").status == 503
    assert here.get("/shares").status == 200


def test_a_preview_leads_to_its_page_and_is_made_once(open_stage: Stage) -> None:
    form = {"text": open_stage.file.read_text().replace("k: 1.0", "k: 9.0"), "days": "7"}
    found = open_stage.post("/shares/policy/preview", form)
    assert found.status == 303
    where = found.headers["Location"]
    settled(open_stage.previews, where.rpartition("/")[2])
    shown = text(open_stage.get(where))
    for words in ("GPUs of every queue under both policies", "▲ +40.0", "12 → 9", "jobs are as long as they were"):
        assert words in shown
    assert "+k: 9.0" in shown
    assert open_stage.post("/shares/policy/preview", form).headers["Location"] == where
    assert json.loads(open_stage.get(where + "/state").body)["state"] == "done"
    assert open_stage.get("/shares/preview/unknown").status == 404
    assert open_stage.get(where + "/else").status == 404


@pytest.fixture
def slow(tmp_path: Path) -> tuple[Stage, threading.Event]:
    """Pages whose previews wait for the event, or until they are stopped."""
    go = threading.Event()

    def work(order: PreviewOrder, told: ProgressCallback, stop: threading.Event) -> Comparison:
        told(0.25, "reading the ledger")
        for _ in range(1_000):
            if stop.is_set():
                raise Cancelled
            if go.wait(0.01):
                return quick(order, told, stop)
        raise AssertionError("the event was not set")

    return stage(tmp_path, cycles=1, work=work), go


def test_one_preview_at_a_time_with_progress_and_an_end(slow: tuple[Stage, threading.Event]) -> None:
    here, _ = slow
    form = {"text": here.file.read_text().replace("k: 1.0", "k: 9.0"), "days": "7"}
    where = here.post("/shares/policy/preview", form).headers["Location"]
    assert "Replaying" in text(here.get(where))
    assert b'http-equiv="refresh"' in here.get(where).body
    busy = here.post("/shares/policy/preview", {**form, "days": "3"})
    assert (busy.status, where in text(busy)) == (409, True)
    assert here.post(where, {}).status == 303
    assert settled(here.previews, where.rpartition("/")[2]).state == "cancelled"
    assert "The preview was stopped" in text(here.get(where))
    here.post("/shares/policy/preview", form)  # again, after it was stopped
    here.previews.close()
    assert settled(here.previews, where.rpartition("/")[2]).state == "cancelled"


@pytest.mark.parametrize("fault", [RuntimeError("the ledger has no GPU time in the last 168 hours"), ValueError()])
def test_a_preview_that_fails_says_why(tmp_path: Path, fault: Exception) -> None:
    def work(order: PreviewOrder, told: ProgressCallback, stop: threading.Event) -> Comparison:
        raise fault

    here = stage(tmp_path, cycles=1, work=work)
    found = here.post("/shares/policy/preview", {"text": here.file.read_text(), "days": "3"})
    settled(here.previews, found.headers["Location"].rpartition("/")[2])
    assert (str(fault) or "ValueError") in text(here.get(found.headers["Location"]))


def test_a_defect_is_answered_and_logged_as_one(tmp_path: Path) -> None:
    here = stage(tmp_path, cycles=1)
    here.accountant.decisions = [7]  # type: ignore[list-item]  # what no accountant answers
    with structlog.testing.capture_logs() as logged:
        found = here.get("/shares/decisions")
    assert (found.status, "AttributeError" in text(found)) == (500, False)
    assert [(each["event"], each["path"]) for each in logged] == [("request_failed", "/shares/decisions")]
