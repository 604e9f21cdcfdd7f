"""The page of a running cache, and the policy that lets a browser run only its own script."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path


def _sources(tag: str, text: str) -> str:
    """Return the digests of a page's elements, as a content security policy lists them."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in found]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


@cache
def page() -> tuple[bytes, str]:
    """Return the page and its content security policy."""
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_sources('script', text)};"
        f" style-src {_sources('style', text)}; connect-src 'self'; img-src data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy
