"""What pyproject.toml cannot say: the compiled modules, and the page that a package index shows.

``KVLADDER_URL`` is the address of the public repository, which a release sets. Then links of
README lead to the release's files there, and the index lists them. Without it the links become
text: an index has none of the files.
"""

import os
import re
import tomllib
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).parent
COMPILED = {
    "kvladder.gpu.tree._columns": "gpu/tree/_columns.c",
    "kvladder.policy._panel": "policy/_panel.c",
}
_CODE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def shown(text: str, url: str, tag: str) -> str:
    """Return a page whose links to files lead to ``url``, or are text if that is empty."""

    def lead(found: re.Match[str]) -> str:
        said, path, anchor = found[1], found[2], found[3] or ""
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"[{said}]({url}/{kind}/{tag}/{path}{anchor})" if url else said

    parts = _CODE.split(text)  # code is every second one
    return "".join(part if i % 2 else _LINK.sub(lead, part) for i, part in enumerate(parts))


def urls(url: str, tag: str) -> dict[str, str]:
    """Return the addresses that an index lists; none without ``url``."""
    if not url:
        return {}
    files = f"{url}/blob/{tag}"
    return {
        "Source": url,
        "Documentation": f"{files}/docs/index.md",
        "Changelog": f"{files}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }


version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
address = os.environ.get("KVLADDER_URL", "").rstrip("/")
setup(
    long_description=shown(
        (ROOT / "README.md").read_text(encoding="utf-8"), address, f"v{version}"
    ),
    long_description_content_type="text/markdown",
    project_urls=urls(address, f"v{version}"),
    # without a compiler their loops run in Python
    ext_modules=[
        # fused operations would give other results than Python
        Extension(name, [source], extra_compile_args=["-ffp-contract=off"], optional=True)
        for name, source in COMPILED.items()
    ],
)
