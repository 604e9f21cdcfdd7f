"""Refuses requests at a TCP port that a foreign web page or an unknown client may have sent."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from hmac import compare_digest
from typing import Final

from kvladder.control.http import JSON, HttpRequest, HttpResponse, refusal

READING: Final = frozenset({"GET", "HEAD"})


def host_of(authority: str) -> str:
    """Return the host of ``host:port``, in lower case and without a port or brackets."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    return authority.partition(":")[0].lower()


@lru_cache(64)
def is_numeric(host: str) -> bool:
    """Return whether a host is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Guard:
    """Decides which requests at a port are refused.

    A page of another site can make a browser send requests here. Its script names its own origin,
    or after DNS rebinding its own host. So only addresses, ``localhost`` and configured names are
    accepted as hosts, and no other origin. Changes need the token, in a header that browsers never
    add by themselves.

    Parameters
    ----------
    tokens:
        Returns the accepted secrets; a change needs one of them. None: no changes are accepted.
    hosts:
        Names, beside addresses and ``localhost``, under which clients may reach the port.
    """

    def __init__(self, tokens: Callable[[], Sequence[str]], hosts: Collection[str]) -> None:
        self._tokens = tokens
        self._hosts = {"localhost", *(host.lower() for host in hosts)}

    def refusal(self, request: HttpRequest) -> HttpResponse | None:
        """Return the refusal of a request; None if it may be answered."""
        authority = request.headers.get("host", "")
        host = host_of(authority)
        if host not in self._hosts and not is_numeric(host):
            what = f"host {host!r} is not served here"
            why = f"{what}: expected an address, localhost, or a name in http.hosts"
            return refusal(421, why)
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != authority.lower():
            return refusal(403, f"origin {origin!r} is another site: open the page of this cache")
        site = request.headers.get("sec-fetch-site", "none")
        if site not in {"none", "same-origin"} and not self._is_opened(request):
            return refusal(403, f"the request comes from another site ({site})")
        return None if request.method in READING else self._change(request)

    @staticmethod
    def _is_opened(request: HttpRequest) -> bool:
        """Return whether a user follows a link, so that no foreign page sees the answer."""
        headers = request.headers
        is_document = headers.get("sec-fetch-dest") == "document"
        return is_document and request.method in READING

    def _change(self, request: HttpRequest) -> HttpResponse | None:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            return refusal(415, f"expected Content-Type: {JSON}")
        tokens = self._tokens()
        if not tokens:
            hint = "set http.token or http.token_file, or use the control socket"
            return refusal(403, f"no token is configured, so nothing can be changed here: {hint}")
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        own = given.strip().encode("latin-1")
        equal = [compare_digest(own, token.encode()) for token in tokens]
        if scheme.lower() != "bearer" or not any(equal):
            why = "wrong or missing token: expected Authorization: Bearer TOKEN"
            return refusal(401, why, ("WWW-Authenticate", "Bearer"))
        return None
