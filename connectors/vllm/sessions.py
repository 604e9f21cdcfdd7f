"""The sessions that vLLM's requests belong to, prefetch and end."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kvladder.connectors.steps import StepConnector
from kvladder.connectors.vllm.groups import Groups
from kvladder.connectors.vllm.options import REQUEST, Policies, RequestPolicy
from kvladder.connectors.vllm.requests import RequestState
from kvladder.errors import ConfigError
from kvladder.manager import CacheManager


def enter(
    request: Any, policy: RequestPolicy, policies: Policies, connector: StepConnector
) -> RequestPolicy:
    """Return what is done for a request, whose session may have ended; begin its prefetches."""
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
            policies.refuse(request, wrong, what="this one is")
    return policy


def leave(state: RequestState, groups: Groups, manager: CacheManager) -> None:
    """Note the blocks of a request that is over in its session, and end that if it says so."""
    name, sessions = state.policy.session, manager.sessions
    if name is None:
        return
    with suppress(ValueError):  # another request has ended it meanwhile
        runs = [state.keys(group, 0, state.saved[group.index]) for group in groups]
        sessions.use(name, runs, state.salt)
        if state.policy.end_session:
            manager.end_session(name)
