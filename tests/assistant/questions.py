"""Questions of platform engineers, leads and controllers about the ledger of question_ledger.py, with the figures of
their answers, which are computed by hand. Each is asked on the pages, with one command, and by an assistant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

NOTHING: Mapping[str, Any] = {}
Cells = tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """A question and its answer.

    clicks: from the first page on; a text is a link, a button or a heading to unfold, `NAME=VALUE` is chosen or entered
        in a form.
    shown: texts in one row of a table, or (one text) anywhere on the page.
    command, printed: a command and texts in one line of its output.
    tool, arguments, told: the assistant's tool, and fields of one row of its answer, or of the answer itself.
    lead: the lead of team nlp may ask it too, and gets the same figure; otherwise the lead is refused, or is told
        nothing about team vision."""

    asked: str
    clicks: tuple[str, ...]
    shown: Cells
    command: tuple[str, ...]
    printed: Cells
    tool: str
    arguments: Mapping[str, Any]
    told: Mapping[str, Any]
    lead: bool = field(default=False, kw_only=True)


OCTOBER = ("--start", "2026-10-01", "--end", "2026-11-01")
OF_OCTOBER = {"start": "2026-10-01", "end": "2026-11-01"}
QUESTIONS = {
    # Platform engineers
    "agents": Question(
        "Is each agent healthy?", ("Nodes", "24 h"), ("n2", "silent", "24.0"),
        ("accountant", "usage", "--by", "node", "--start", "1d"), ("n2", "24.0"),
        "usage", {"by": "node", "start": "1d"}, {"node": "n2", "unmetered": "24"},
    ),
    "old agents": Question(
        "Which nodes have an agent that is older than the accountant?",
        ("the agent is older than the accountant on n2",), ("n2", "0.0.9 older"),
        ("nodes",), ("n2 (silent, older agent)", "0.0.9"),
        "nodes", NOTHING, {"node": "n2", "silent": True, "agent_version": "0.0.9", "agent_older": True},
    ),
    "GPU errors": Question(
        "Which GPU had errors, and when last?", ("Nodes", "n1"), ("GPU-2", "xid 79", "3", "16 Nov 09:30"),
        ("nodes",), ("n1", "xid 79 × 3", "2026-11-16 09:30"),
        "nodes", {"sort": "errors"},
        {"node": "n1", "gpu_errors": [{"gpu": "GPU-2", "kind": "xid 79", "count": 3, "since": "2026-11-10T08:00:00Z",
                                       "last": "2026-11-16T09:30:00Z"}]},
    ),
    "holder": Question(
        "Who held GPU-2 on 10 November at 14:00?", ("Nodes", "n1", "at=2026-11-10T14:00", "Show"),
        ("GPU-2", "tune", "nlp"),
        ("accountant", "usage", "--by", "gpu,pod,team", "--start", "2026-11-10T14:00:00Z",
         "--end", "2026-11-10T15:00:00Z"),
        ("GPU-2", "tune", "nlp", "1.0"),
        "holds", {"at": "2026-11-10T14:00:00Z", "gpu": "GPU-2"}, {"pod": "tune", "team": "nlp", "held_gpus": 1.0},
        lead=True,
    ),
    "preempted": Question(
        "Why was my pod preempted?", ("Jobs", "search=worker-0", "Show", "Job/train"),
        ("12 Nov 12:00", "team nlp is owed 1 GPU", "0.5", "Job/next"),
        ("jobs", "worker-0"), ("last stop", "team nlp is owed 1 GPU", "prod~nlp~Job~next"),
        "attempts", {"job": "worker-0", "start": "2026-11-01"},
        {"number": 1, "end": "preempted", "reason": "team nlp is owed 1 GPU", "gpu_hours": "2",
         "lost_gpu_hours": "0.5"},
    ),
    "preempted by its scheduler": Question(
        "Why did its own scheduler preempt my pod?", ("Jobs", "Job/tune"),
        ("10 Nov 18:00", "kai-scheduler: preempted by higher priority workload ops/demo"),
        ("jobs", "prod/nlp/Job/tune"), ("kai-scheduler: preempted by higher priority workload ops/demo",),
        "attempts", {"job": "nlp/Job/tune", "start": "2026-11-01"},
        {"number": 1, "end": "preempted", "by": "kai-scheduler",
         "reason": "preempted by higher priority workload ops/demo", "gpu_hours": "8"}, lead=True,
    ),
    "lost": Question(
        "How many GPU-hours of my job were lost by preemptions?", ("Jobs", "Job/train"),
        ("GPU-hours, 0.5 lost by stops",),
        ("jobs", "prod/vision/Job/train"), ("lost by stops", "0.5"),
        "attempts", {"job": "vision/Job/train", "start": "2026-11-01"}, {"lost_gpu_hours": "0.5"},
    ),
    "idle now": Question(
        "Which running jobs do nothing now, and what does that cost?",
        ("Jobs of which no GPU did anything for the last 30 minutes",), ("Notebook/explore", "nlp", "dee", "1", "6.00"),
        ("jobs", "--idle"), ("nlp/Notebook/explore", "0.5"),
        "jobs", {"idle": True}, {"job": "prod/nlp/Notebook/explore", "gpus_now": "1", "cost_an_hour": "6"}, lead=True,
    ),
    "idle notebooks": Question(
        "Which notebooks have been idle for a day?", ("Explore", "Usual questions", "Idle notebooks, 24 h"),
        ("Notebook/explore", "24.0"),
        ("jobs", "--kind", "notebook", "--start", "24h", "--sort", "idle"), ("nlp/Notebook/explore", "24.0"),
        "jobs", {"kind": "notebook", "start": "24h", "sort": "idle"},
        {"job": "prod/nlp/Notebook/explore", "idle_gpu_hours": "24"}, lead=True,
    ),
    "down": Question(
        "Which nodes were down last week?", ("Explore", "Usual questions", "Nodes that were down, 7 days"),
        ("n2", "3.0"),
        ("accountant", "usage", "--by", "node", "--start", "7d"), ("n2", "3.0"),
        "usage", {"by": "node", "start": "7d"}, {"node": "n2", "down": "3"},
    ),
    "waits": Question(
        "Why does this job wait, for what, and how long?", ("Jobs", "waiting", "Job/later"),
        ("It asks for 1 GPU, since 16 Nov 10:00",),
        ("jobs", "later"), ("wait", "2:00:00"),
        "why_waiting", {"job": "later"},
        {"job": "prod/nlp/Job/later", "waited_seconds": 7200, "asks_gpus": 1, "created": "2026-11-16T10:00:00Z"},
        lead=True,
    ),
    "waits of queues": Question(
        "How long do pods wait in each queue?", ("Jobs", "how long queues wait"),
        ("nlp", "4", "1", "0 s", "45.0 min"),
        ("accountant", "waits", "--start", "7d"), ("nlp", "4", "0.75", "0.00"),
        "waits", {"start": "7d"},
        {"queue": "nlp", "pods": 4, "waiting": 1, "queued_mean_seconds": 2700, "queued_median_seconds": 0},
        lead=True,
    ),
    "twice the weight": Question(
        "What happens with twice the weight?", ("Shares", "queue=nlp", "weight=2", "Try it"),
        ("nlp", "1 → 2", "25.0 %", "27.8 %", "0.83"),
        ("fairshare", "try-weight", "nlp", "2"), ("nlp", "25.0%", "27.8%", "0.83"),
        "try_weight", {"queue": "nlp", "weight": 2},
        {"queue": "nlp", "part": 0.25, "part_then": pytest.approx(0.8333 / 3, abs=1e-3)},
    ),
    # Leads of teams
    "wasted": Question(
        "Which of my jobs wasted most last week?", ("Explore", "Usual questions", "Jobs that left most idle, 7 days"),
        ("Notebook/explore", "28.0"),
        ("jobs", "--start", "7d", "--sort", "idle", "--limit", "1"), ("nlp/Notebook/explore", "28.0"),
        "jobs", {"start": "7d", "sort": "idle", "limit": 1},
        {"job": "prod/nlp/Notebook/explore", "idle_gpu_hours": "28"},
        lead=True,
    ),
    "will pay": Question(
        "What will we pay this month?", (), ("nlp-month", "500.00", "228.00", "378.80"),
        ("accountant", "budgets"), ("nlp-month", "500.00", "228.00", "378.80"),
        "budgets", NOTHING, {"name": "nlp-month", "limit": "500", "spent": "228", "forecast": pytest.approx(378.8)},
        lead=True,
    ),
    "last month": Question(
        "How does this month compare with the last one?",
        ("Explore", "Usual questions", "Teams by month"), ("nlp", "24.00", "228.00"),
        ("accountant", "cost", "--by", "team,month", "--start", "2026-10-01"), ("nlp", "2026-10", "24.00"),
        "cost", {"by": "team,month", "start": "2026-10-01"}, {"team": "nlp", "month": "2026-10", "cost": "24"},
        lead=True,
    ),
    "used most": Question(
        "Who used most?", ("Explore", "Usual questions", "Who used most, 30 days"), ("dee", "28.0"),
        ("accountant", "usage", "--by", "user", "--start", "30d"), ("dee", "28.0"),
        "usage", {"by": "user", "start": "30d"}, {"user": "dee", "held": "28"}, lead=True,
    ),
    "by model": Question(
        "What did each GPU model cost?", ("Explore", "Usual questions", "Cost by GPU model"),
        ("NVIDIA H100 80GB HBM3", "306.00"),
        ("accountant", "cost", "--by", "gpu_model"), ("NVIDIA H100 80GB HBM3", "306.00"),
        "cost", {"by": "gpu_model"}, {"gpu_model": "NVIDIA H100 80GB HBM3", "cost": "306"},
    ),
    "by project and model": Question(
        "What did each project cost on each GPU model?", ("Month", "by project and GPU model"),
        ("NVIDIA H100 80GB HBM3", "228.00"),
        ("accountant", "cost", "--by", "label:project,gpu_model"), ("chat", "NVIDIA H100 80GB HBM3", "228.00"),
        "cost", {"by": "label:project,gpu_model"},
        {"label:project": "chat", "gpu_model": "NVIDIA H100 80GB HBM3", "cost": "228"}, lead=True,
    ),
    "by project": Question(
        "What did each project cost?", ("Explore", "by=label:project", "Show"), ("chat", "228.00"),
        ("accountant", "cost", "--by", "label:project"), ("chat", "228.00"),
        "cost", {"by": "label:project"}, {"label:project": "chat", "cost": "228"}, lead=True,
    ),
    "cost an hour": Question(
        "What does my job cost an hour?", ("Jobs", "Job/live"), ("6.00 per hour now",),
        ("jobs", "live"), ("now", "1.0 GPUs", "6.00 USD per hour"),
        "jobs", {"search": "Job/live"}, {"job": "prod/vision/Job/live", "cost_an_hour": "6"},
    ),
    "above": Question(
        "Is my team above its guarantee?", ("Shares",), ("nlp", "0.5", "1.0", "0.5 above its guarantee"),
        ("accountant", "guarantees"), ("nlp", "0.5", "1.0", "0.5"),
        "guarantees", NOTHING, {"queue": "nlp", "guaranteed_gpus": "0.5", "held_gpus": "1", "above_gpus": "0.5"},
        lead=True,
    ),
    # Controllers
    "the month": Question(
        "What does each team owe for October, for the invoice?", ("Month", "← 2026-10"), ("nlp", "24.00"),
        ("accountant", "cost", "--by", "team", *OCTOBER), ("nlp", "24.00"),
        "explain_statement", {"month": "2026-10", "team": "nlp"}, {"due_total": "24"}, lead=True,
    ),
    "two months": Question(
        "What did each team cost in two months?", ("Explore", "Usual questions", "Teams by month"),
        ("nlp", "24.00", "228.00"),
        ("accountant", "cost", "--by", "team,month", "--start", "2026-10-01"), ("nlp", "2026-11", "228.00"),
        "cost", {"by": "team,month", "start": "2026-10-01"}, {"team": "nlp", "month": "2026-11", "cost": "228"},
        lead=True,
    ),
    "changed": Question(
        "What changed since October was closed?", ("late records of 1 closed month wait to be booked",),
        ("vision", "6.00"),
        ("accountant", "proposals"), ("vision", "6.00"),
        "changes", {"month": "2026-10"}, {"cause": "waiting", "team": "vision", "amount": "6.00", "gpu_hours": "1"},
    ),
    "since the draft": Question(
        "What changed of this month since the draft?", ("Invoices", "2026-11"),
        ("late records", "nlp", "+66.00", "they arrived after it"),
        ("accountant", "changes", "2026-11"), ("late records", "nlp", "66.00"),
        "changes", {"month": "2026-11"}, {"cause": "late records", "team": "nlp", "amount": "66"}, lead=True,
    ),
    "before closing": Question(
        "What will closing November ask?", ("Invoices", "2026-11"), ("late nodes", "open", "n2"),
        ("accountant", "close", "2026-11", "--preview"), ("late nodes", "open", "n2"),
        "closing", {"month": "2026-11"}, {"item": "late nodes", "state": "open"},
    ),
    "closed": Question(
        "Is October closed and published?", ("Month", "← 2026-10"), ("published",),
        ("accountant", "months"), ("2026-10", "published", "all"),
        "months", NOTHING, {"month": "2026-10", "status": "published", "closed_by": "all"},
    ),
    "by cost centre": Question(
        "What does each cost centre pay?", ("Explore", "by=label:cost-centre", "Show"), ("4200", "228.00"),
        ("accountant", "cost", "--by", "label:cost-centre"), ("4200", "228.00"),
        "cost", {"by": "label:cost-centre"}, {"label:cost-centre": "4200", "cost": "228"}, lead=True,
    ),
    # Asked in the trackers of OpenCost, Kubecost, XDMoD, Open OnDemand, Run:ai and Grafana
    "nobody's": Question(
        "What does capacity cost that nobody holds? (OpenCost)", ("Explore",), ("unallocated", "6.00"),
        ("accountant", "cost", "--by", "team"), ("(unallocated)", "6.00"),
        "cost", {"by": "team"}, {"team": "__idle__", "cost": "6"},
    ),
    "namespace": Question(
        "What did a namespace cost? (OpenCost)", ("Explore", "by=namespace", "Show"), ("nlp", "228.00"),
        ("accountant", "cost", "--by", "namespace"), ("nlp", "228.00"),
        "cost", {"by": "namespace"}, {"namespace": "nlp", "cost": "228"}, lead=True,
    ),
    "efficiency": Question(
        "How much of what a team holds does it use? (Kubecost)", ("Explore",), ("nlp", "38.0", "28.0", "26.3 %"),
        ("accountant", "usage", "--by", "team"), ("nlp", "10.0", "28.0"),
        "usage", {"by": "team"}, {"team": "nlp", "held": "38", "busy": "10", "allocated_idle": "28"}, lead=True,
    ),
    "notebook with idle": Question(
        "What did a notebook cost, the time that it did nothing included? (Kubecost)", ("Jobs",),
        ("Notebook/explore", "28.0", "168.00"),
        ("jobs", "--search", "explore"), ("nlp/Notebook/explore", "28.0", "168.00"),
        "jobs", {"search": "explore"}, {"idle_gpu_hours": "28", "cost": "168"}, lead=True,
    ),
    "waited": Question(
        "How long did a job wait before it ran? (XDMoD)", ("Jobs",), ("Job/next", "1.0 h"),
        ("jobs", "--search", "next"), ("nlp/Job/next", "1:00:00"),
        "jobs", {"search": "next"}, {"job": "prod/nlp/Job/next", "waited_seconds": 3600}, lead=True,
    ),
    "user by month": Question(
        "How many GPU-hours did a user have in a month? (XDMoD)",
        ("Explore", "last month", "by=user", "Show"), ("ada", "11.0"),
        ("accountant", "usage", "--by", "user", *OCTOBER), ("ada", "11.0"),
        "usage", {"by": "user", **OF_OCTOBER}, {"user": "ada", "held": "11"},
    ),
    "running": Question(
        "What runs now, and with how many GPUs? (Open OnDemand)", ("Jobs", "running"), ("Notebook/explore", "1"),
        ("jobs", "--state", "running"), ("nlp/Notebook/explore", "1.0"),
        "jobs", {"state": "running"}, {"job": "prod/nlp/Notebook/explore", "gpus_now": "1"}, lead=True,
    ),
    "idle GPUs": Question(
        "Which GPUs of a node are held and do nothing? (Grafana)", ("Explore", "7 days", "by=gpu", "Show"),
        ("GPU-2", "36.0", "28.0"),
        ("accountant", "usage", "--by", "gpu", "--start", "7d"), ("GPU-2", "8.0", "28.0"),
        "usage", {"by": "gpu", "start": "7d"}, {"gpu": "GPU-2", "busy": "8", "allocated_idle": "28"}, lead=True,
    ),
    "kinds": Question(
        "What did notebooks cost? (Run:ai)", ("Explore", "by=kind", "Show"), ("notebook", "168.00"),
        ("accountant", "cost", "--by", "kind"), ("notebook", "168.00"),
        "cost", {"by": "kind"}, {"kind": "notebook", "cost": "168"}, lead=True,
    ),
    "hours of the day": Question(
        "At which hours of the day are GPUs held, and do nothing? (Grafana)",
        ("Explore", "Usual questions", "Hours of the day, 30 days"), ("10:00", "9.0", "4.2"),
        ("accountant", "usage", "--by", "hour_of_day", "--start", "30d"), ("10:00", "4.8", "4.2"),
        "usage", {"by": "hour_of_day", "start": "30d"}, {"hour_of_day": "10:00", "held": "9"},
    ),
    "pod": Question(
        "Which pod used how much? (Grafana)", ("Explore", "by=pod", "Show"), ("tune", "8.0"),
        ("accountant", "usage", "--by", "pod"), ("tune", "8.0"),
        "usage", {"by": "pod"}, {"pod": "tune", "held": "8", "busy": "8"}, lead=True,
    ),
    "covered": Question(
        "How much of the month is known at all? (Grafana)", ("Explore",), ("5.9 % metered",),
        ("accountant", "usage",), ("5.9 %", "metered"),
        "usage", NOTHING, {"coverage": pytest.approx(51 / 865.0, abs=0.002)},
    ),
}  # fmt: skip
