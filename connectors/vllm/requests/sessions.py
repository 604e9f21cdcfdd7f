"""Sessions of requests: checks at a request's start, and records at its end."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kvladder.connectors.steps import StepConnector
from kvladder.connectors.vllm.groups import VllmGroups
from kvladder.connectors.vllm.options import REQUEST, Policies, RequestPolicy
from kvladder.connectors.vllm.requests.state import RequestState
from kvladder.errors import ConfigError


def begin_in_session(
    connector: StepConnector, policies: Policies, request: Any, policy: RequestPolicy
) -> RequestPolicy:
    """Check that the request's session is open, and begin its prefetches; return its policy.

    If the session has ended, report that, and return the policy without parameters.
    """
    manager = connector.manager
    if policy.session is not None:
        try:
            manager.sessions.require_open(policy.session)
        except ValueError as error:
            policies.refuse(request, ConfigError(str(error), path=f"{REQUEST}.session"))
            return policies.plain(request)
    for n, name in enumerate(policy.prefetch):
        try:
            connector.rising.add(manager.prefetch(name))
        except ValueError as error:
            wrong = ConfigError(str(error), path=f"{REQUEST}.prefetch[{n}]")
            policies.refuse(request, wrong, what="this prefetch is")
    return policy


def end_in_session(connector: StepConnector, groups: VllmGroups, state: RequestState) -> None:
    """Record a finished request's blocks in its session; end the session if it asks for that."""
    manager, name = connector.manager, state.policy.session
    if name is None:
        return
    with suppress(ValueError):  # another request has ended the session meanwhile
        runs = [state.keys(group, 0, state.saved[group.index]) for group in groups]
        manager.sessions.use(name, runs, state.salt)
        if state.policy.end_session:
            manager.end_session(name)
