"""Pack a vLLM that a machine without a network runs with its own torch: ``gpu_vllm.py ARCHIVE``.

vLLM's wheel has several hundred MiB, most of it device code of other architectures and kernels that
the parts of ``make gpu`` do not use. The archive has less than 60 MiB: vLLM, what it imports beside
torch, NumPy and transformers, and kvladder's dependencies. vLLM's extensions use only the stable
interface of torch, so that they also load in an older torch than vLLM asks for.
``benchmarks/README.md`` says how to use it.
"""

from __future__ import annotations

import argparse
import shutil
import struct
import subprocess
import sys
import tarfile
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory

from gpu_wheels import for_machine, name_of, wanted

IMPORTED = (
    "annotated-types", "apache-tvm-ffi", "blake3", "cachetools", "cbor2", "compressed-tensors",
    "docstring-parser", "email-validator", "fastapi", "httpcore2", "httpx2", "ijson", "interegular",
    "jiter", "jmespath", "jsonschema", "jsonschema-specifications", "lark", "llguidance",
    "lm-format-enforcer", "loguru", "mcp", "mcp-types", "model-hosting-container-standards",
    "openai", "opentelemetry-api", "opentelemetry-sdk", "opentelemetry-semantic-conventions",
    "oss-harmony", "partial-json-parser", "prometheus-fastapi-instrumentator", "pybase64",
    "pydantic", "pydantic-core", "pydantic-extra-types", "pydantic-settings", "pyjwt",
    "python-dotenv", "python-json-logger", "python-multipart", "pyzmq", "referencing", "rpds-py",
    "setproctitle", "sniffio", "sse-starlette", "starlette", "truststore", "typing-inspection",
    "uvicorn", "websockets", "xgrammar",
)  # fmt: skip
"""What ``import vllm`` needs beside torch, NumPy, transformers and what these bring."""
EXTENSIONS = {
    "_C_stable_libtorch.abi3.so", "_moe_C_stable_libtorch.abi3.so", "_vllm_fa3_C.abi3.so",
    "cumem_allocator.abi3.so", "fs_io_C.abi3.so", "spinloop.abi3.so",
}  # fmt: skip
UNUSED = ("fused_moe/configs", "third_party/deep_gemm", "quantization/utils/configs")
"""Folders of vLLM with tables for single GPUs and with headers."""
SOURCES = {".cubin", ".h", ".cuh", ".hpp", ".cu"}
PROGRAM_BYTES = 2_000_000
"""Other files of vLLM above this size are programs of their own."""
FATBIN = struct.pack("<I", 0xBA55ED50)
"""Begins device code in an extension: magic number, version, size of this header, size of all."""
MACHINE_CODE = 2


def install(folder: Path, version: str, python: str) -> None:
    """Install wheels for that machine, without what they depend on; raise if pip fails."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
    command += ["--target", str(folder), *for_machine(python)]
    exact = f"vllm==={version}"  # two signs would also take +cpu
    subprocess.run([*command, exact], check=True)  # noqa: S603 - our own words
    (vllm,) = distributions(name="vllm", path=[str(folder)])
    asks = [one.partition(";")[0].strip() for one in vllm.requires or ()]
    versions = {name_of(one).lower().replace("_", "-"): one for one in asks}
    named = [versions.get(name, name) for name in IMPORTED]
    subprocess.run([*command, *named, *wanted()], check=True)  # noqa: S603 - names of projects


def trim(folder: Path, architecture: int) -> None:
    """Remove what is not used, and the device code of other architectures."""
    shutil.rmtree(folder / "bin", ignore_errors=True)
    for path in [*(folder / "vllm").rglob("*")]:
        if not path.is_file():
            continue
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".so":
            if path.name in EXTENSIONS:
                path.write_bytes(keep_only(bytearray(path.read_bytes()), architecture))
            else:
                path.unlink()
        elif (
            any(one in name for one in UNUSED)
            or path.suffix in SOURCES
            or path.stat().st_size > PROGRAM_BYTES
        ):
            path.unlink()


def keep_only(library: bytearray, architecture: int) -> bytearray:
    """Write zeros over device code of other architectures, which then compresses to nothing.

    Each fatbin has entries, each with a header: kind (u16), version (u16), size of the header
    (u32), size of the code (u64), ..., at 28 the architecture (u32). They stay, so the driver still
    finds the entry for its device.
    """
    at = 0
    while (at := library.find(FATBIN, at)) >= 0:
        version, header, size = struct.unpack_from("<HHQ", library, at + 4)
        if (version, header) != (1, 16):
            at += len(FATBIN)
            continue
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _, before, code = struct.unpack_from("<HHIQ", library, entry)
            (found,) = struct.unpack_from("<I", library, entry + 28)
            if (kind, found) != (MACHINE_CODE, architecture):
                library[entry + before : entry + before + code] = bytes(code)
            entry += before + code
        at = end
    return library


def main() -> int:
    """Install, trim and pack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path, help="file to write, NAME.tar.xz")
    parser.add_argument("--vllm", default="0.32.0", help="version of vLLM")
    parser.add_argument("--python", default="3.12", help="version of Python on that machine")
    parser.add_argument("--architecture", type=int, default=90, help="90 is Hopper, 100 Blackwell")
    arguments = parser.parse_args()
    with TemporaryDirectory(prefix="kvladder-") as name:
        folder = Path(name)
        install(folder, arguments.vllm, arguments.python)
        trim(folder, arguments.architecture)
        arguments.archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(arguments.archive, "w:xz") as archive:
            archive.add(folder, ".")
    size = arguments.archive.stat().st_size
    print(f"{size / 2**20:.1f} MiB in {arguments.archive}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
