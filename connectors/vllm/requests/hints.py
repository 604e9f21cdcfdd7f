"""Hints in vLLM: read from a request, done at its start and at its end, and answered."""

from __future__ import annotations

from typing import Any

import msgspec

from kvladder.connectors.steps import StepConnector
from kvladder.connectors.vllm.groups import VllmGroups
from kvladder.connectors.vllm.options import RequestPolicy
from kvladder.connectors.vllm.requests.state import RequestState
from kvladder.hints.requests import RequestHints, begin
from kvladder.schema import is_mapping


def begin_hints(
    connector: StepConnector, request: Any, policy: RequestPolicy
) -> tuple[RequestPolicy, RequestHints | None]:
    """Do what a request's hints ask at its start; return its policy with what they ask for it.

    vLLM 0.33 has ``Request.kv_hints``; over HTTP, and in 0.32, they are
    ``kv_transfer_params.kv_hints``. Without hints the second result is None.
    """
    given: object = getattr(request, "kv_transfer_params", None)
    sent: object = getattr(request, "kv_hints", None)
    if sent is None and is_mapping(given):
        sent = given.get("kv_hints")
    if sent is None:
        return policy, None
    hints = begin(
        connector.hints,
        sent,
        salt=getattr(request, "cache_salt", None) or "",
        trace=getattr(request, "trace_headers", None),
    )
    if hints.ranked is not None:
        priority, lasts_s = hints.ranked
        policy = msgspec.structs.replace(
            policy,
            pin_s=None,
            priority=None,
            retention=((0, None, priority, lasts_s),),
            decode_priority=priority,
            decode_duration_s=lasts_s,
        )
    return policy, hints


def end_hints(connector: StepConnector, groups: VllmGroups, state: RequestState) -> None:
    """Do what the hints of a finished request ask about its own blocks."""
    if state.hints is not None and state.hints.waiting:
        runs = [state.keys(group, 0, state.saved[group.index]) for group in groups]
        state.hints.finish(connector.hints, runs, state.salt)


def answer_of(state: RequestState) -> dict[str, Any] | None:
    """Return what a request's answer says of its blocks and its hints; None if nothing is asked."""
    report = state.reported() or {}
    if state.hints is not None:
        report["hints"] = [result._asdict() for result in state.hints.results]
    return report or None
