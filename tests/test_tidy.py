"""Style that matters is a test: sizes, words, layering, and nothing shipped without its suite.

A test reads all files at once and lists each breach of its rule as ``path:line: what``. The last
test gives each rule an example of what it forbids.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.kit.source import (
    LINKS,
    ROOT,
    Check,
    Source,
    classes,
    derived,
    dotted,
    offenders,
    python_files,
    read,
)

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 450
"""Lines of a file that a reader must understand as a whole."""
LIST_LINES_MAX = 600
"""Lines of tests and measurements, of which a reader needs one at a time, and of these files."""
LONG = {
    "kvladder/config/settings.py": "a list of settings with their documentation",
    "kvladder/config/stack.py": "the configuration, its table, and rules between settings",
    "kvladder/compose.py": "makes one part of a cache after the other",
    "kvladder/manager.py": "the calls of an engine's thread; a third is their documentation",
    "kvladder/testing/fixtures.py": "a list of fixtures",
    "kvladder/testing/tiers.py": "a list of tests",
    "tiers/nixl/line.py": "one connection, from its first attempt to its end",
    "tiers/nixl/tier.py": "the calls of a tier, one after the other",
    "tiers/redis/tier.py": "the calls of a tier, one after the other",
    "policy/panel.py": "is read beside its twin in C, in the same order",
    "connectors/transformers/growing.py": "a buffer, a layer of each kind, the cache of them",
    "gpu/requests/sequence.py": "the calls of one request; a fifth is their documentation",
    "gpu/requests/requests.py": "the calls of an engine; a third is their documentation",
    "gpu/sizing/plan.py": "one plan: a calculation step by step",
}
"""Longer files, and what a reader of one need not understand at once; the list only shrinks."""
FOLDER_FILES_MAX = 16
LINE_LENGTH_MAX = 100

# Where an error of any kind may be caught and not raised again, and why.
CATCHES_ALL = {
    "tiers/ladder/calling/client.py": "turns whatever a tier says into a value",
    "tiers/ladder/records/guard.py": "leaves a policy that fails for LRU, and says so",
    "tiers/ladder/calling/breaker.py": "has a task that died begin anew",
    "kvladder/runtime.py": "counts it: the loop goes on",
    "tiers/blocking.py": "hands it to whoever awaits the call",
    "kvladder/children/pipe.py": "tells the process that called",
    "kvladder/children/spawn.py": "ends with a status that says so",
    "tiers/codecs/pipeline.py": "has a codec's fault cost one block, and says it",
    "tiers/files/threads.py": "hands it to whoever awaits the batch",
    "gpu/copy/copier.py": "reports it with the job whose copy failed",
    "gpu/copy/cuda.py": "says it; small pages are copied without a kernel",
    "gpu/copy/streams.py": "reports it with the job whose copy failed",
    "kvladder/planning/models.py": "names it as why the rules were asked",
}
# An engine must outlive its connector.
ENGINE_EDGE = re.compile(r"connectors/(vllm\w*|sglang|trtllm)/.*\.py")

# Services that product code takes from outside, and where they are made.
CLOCKS = {"time.time", "time.time_ns", "time.sleep"}
CLOCK_MAKER = "tiers/blocking.py"
TEST_KIT = "kvladder/testing/"
PRINTERS = ("kvladder/cli/",)

BANNED_WORDS = {"chunk", "chunks", "swap", "swaps", "swapped", "swapping"}
_BANNED = re.compile("|".join(sorted(BANNED_WORDS)), re.IGNORECASE)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_LEFT = re.compile(r"#.*\b(TODO|FIXME|XXX)\b")

CHANGE_THEMSELVES = ("gpu/", "kvladder/device/", "tiers/ladder/")

SUITES = {
    "Tier": "TierTests",
    "EvictionPolicy": "PolicyTests",
    "Codec": "CodecTests",
    "ResourceHandler": "HandlerTests",
}


@cache
def product() -> list[Source]:
    return read(python_files("kvladder", *LINKS))


@cache
def everything() -> list[Source]:
    return [*product(), *read(python_files("tests", "benchmarks", "examples"))]


@cache
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def require(found: Iterable[str]) -> None:
    """Fail with one line for each offender, if there are any."""
    if lines := list(found):
        pytest.fail("\n".join(lines), pytrace=False)


def test_sources_to_check_are_found():
    names = {source.name for source in product()}
    assert {"kvladder/arena.py", "tiers/base.py", "policy/eviction.py"} <= names
    assert not [name for name in names if name.startswith("kvladder/tiers/")]
    assert {"tests/test_tidy.py", "tests/tiers/test_files.py"} <= {s.name for s in everything()}


# ---- packaging


def test_the_makefile_lists_every_file_of_tests_that_start_vllm():
    named = re.search(r"^STARTS_VLLM := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    marks = re.compile(r"^\s*(@|pytestmark = )pytest\.mark\.vllm\b", re.MULTILINE)
    marked = [source.name for source in everything() if marks.search(source.text)]
    assert marked
    assert named
    run = tuple(named[1].split())
    require(f"{name}: not in STARTS_VLLM" for name in marked if not name.startswith(run))


def test_the_packages_are_the_folders():
    settings = project()["tool"]["setuptools"]
    parents = {Path(source.name).parent.parts for source in product()}
    folders = {
        ".".join(parts if parts[0] == "kvladder" else ("kvladder", *parts)) for parts in parents
    }
    assert set(settings["packages"]) == folders
    inside = [Path(*package.split(".")[1:]) for package in settings["packages"]]
    inits = [Path("kvladder") / folder / "__init__.py" for folder in inside]
    require(f"{init}: is not there" for init in inits if not (ROOT / init).is_file())


def test_the_links_lead_to_the_folders():
    directories = project()["tool"]["setuptools"]["package-dir"]
    for name in LINKS:
        link = ROOT / "kvladder" / name
        assert link.is_symlink(), name
        assert link.readlink() == Path("..") / name
        assert link.resolve() == ROOT / name
        assert directories[f"kvladder.{name}"] == name
        assert f"kvladder/{name}" in project()["tool"]["pyright"]["include"]
    assert (ROOT / "kvladder" / "py.typed").is_file()


def test_bare_imports_of_the_folders_are_banned():
    banned = project()["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert set(banned) == set(LINKS)


# ---- sizes


def too_long(source: Source) -> Iterator[tuple[int, str]]:
    is_list = source.name in LONG or source.name.startswith(("tests/", "benchmarks/"))
    most = LIST_LINES_MAX if is_list else FILE_LINES_MAX
    if len(source.lines) > most:
        yield len(source.lines), f"a file has at most {most} lines"
    for number, line in enumerate(source.lines, 1):
        if len(line) > LINE_LENGTH_MAX:
            yield number, f"a line has at most {LINE_LENGTH_MAX} characters"
    for node in source.statements:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield node.lineno, f"{node.name} has {length} lines, over {FUNCTION_LINES_MAX}"


def test_lines_functions_and_files_are_short():
    require(offenders(too_long, everything()))


def test_files_that_may_be_longer_are():
    lines = {one.name: len(one.lines) for one in product()}
    assert not {name for name in LONG if lines[name] <= FILE_LINES_MAX}


def test_folders_hold_few_files():
    for folder in sorted({Path(source.name).parent for source in product()}):
        files = [path for pattern in ("*.py", "*.c") for path in (ROOT / folder).glob(pattern)]
        files = [path for path in files if path.name != "__main__.py"]  # three lines, to run it
        assert len(files) <= FOLDER_FILES_MAX, folder


def undocumented(source: Source) -> Iterator[tuple[int, str]]:
    if not ast.get_docstring(source.tree):
        yield 1, "no docstring"


def test_files_have_docstrings():
    require(offenders(undocumented, everything()))


# ---- forbidden in product code


def own_clock_or_dice(source: Source) -> Iterator[tuple[int, str]]:
    uses = [(n.lineno, dotted(n)) for n in source.nodes if isinstance(n, ast.Attribute)]
    allowed = {"time.time"} if source.name == CLOCK_MAKER else set()
    for line, use in [*uses, *source.imported()]:
        if use in CLOCKS - allowed:
            yield line, f"{use}: a clock is injected"
    for line, use in source.imported():
        if use.split(".")[0] == "random" and use != "random.Random":
            yield line, f"{use}: a generator is injected"


def test_product_code_takes_time_and_randomness_from_outside():
    require(offenders(own_clock_or_dice, product()))


def prints(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes if not source.name.startswith(PRINTERS) else ():
        if isinstance(node, ast.Call) and dotted(node.func) == "print":
            yield node.lineno, "product code does not print"


def test_product_code_does_not_print():
    require(offenders(prints, product()))


def catches_all(source: Source) -> Iterator[tuple[int, str]]:
    name = source.name
    if name in CATCHES_ALL or ENGINE_EDGE.fullmatch(name) or name.startswith(TEST_KIT):
        return
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler) and catches_any(node):
            last = node.body[-1]
            if not (isinstance(last, ast.Raise) and last.exc is None):
                yield node.lineno, "catches everything and does not raise it again"


def catches_any(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or dotted(kind) in {"Exception", "BaseException"} for kind in kinds)


def test_only_the_edges_catch_everything():
    require(offenders(catches_all, product()))
    assert set(CATCHES_ALL) <= {source.name for source in product()}, "these files are gone"


def sets_from_outside(source: Source) -> Iterator[tuple[int, str]]:
    """Yield where a module sets an attribute of an object whose class it does not define.

    Counters are left out: code that sees an event counts it in the ``stats``.
    """
    stores = [
        node
        for node in source.nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    ]
    own = {node.attr for node in stores if dotted(node.value) == "self"}
    fields = [node.target for node in source.nodes if isinstance(node, ast.AnnAssign)]
    own |= {field.id for field in fields if isinstance(field, ast.Name)}
    for node in stores:
        owner = dotted(node.value)
        if node.attr not in own and owner.rsplit(".", 1)[-1].lstrip("_") != "stats":
            yield node.lineno, f"sets {ast.unparse(node)}"


def test_objects_are_changed_by_their_own_methods():
    changing = [source for source in product() if source.name.startswith(CHANGE_THEMSELVES)]
    assert changing
    require(offenders(sets_from_outside, changing))


# ---- words


def banned_words(source: Source) -> Iterator[tuple[int, str]]:
    if not _BANNED.search(source.text):  # no need to split it into tokens
        return
    for line, text in source.named():
        for word in _WORD.findall(text):
            if word.lower() in BANNED_WORDS:
                yield line, f"{word.lower()}: say block, slot, demote or promote"


def test_the_words_of_the_glossary_are_used():
    require(offenders(banned_words, product()))


def left_to_do(source: Source) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(source.lines, 1):
        if found := _LEFT.search(line):
            yield number, found[1]


def test_no_note_of_work_to_do_is_left():
    this = str(Path(__file__).relative_to(ROOT))  # it has examples
    require(offenders(left_to_do, [one for one in everything() if one.name != this]))


MESSAGES = (
    "connectors/sglang/node.py",
    "kvladder/children/messages.py",
    "tiers/nixl/messages.py",
)
"""Protocols: the names of their messages are theirs alone."""


def same_names(sources: Iterable[Source]) -> list[str]:
    """List classes of one name that several files define, except messages of protocols."""
    first: dict[str, str] = {}
    found = list[str]()
    for source in sources:
        classes = [node for node in source.statements if isinstance(node, ast.ClassDef)]
        for node in [] if source.name in MESSAGES else classes:
            place = first.setdefault(node.name, f"{source.name}:{node.lineno}")
            if not place.startswith(f"{source.name}:"):
                found.append(f"{source.name}:{node.lineno}: {node.name} is a class of {place}, too")
    return found


def test_a_class_can_be_found_by_its_name():
    require(same_names(product()))


def test_two_classes_of_one_name_are_found():
    sources = [Source("a.py", "class A: ..."), Source("b.py", "class B: ...\nclass A: ...")]
    assert same_names(sources) == ["b.py:2: A is a class of a.py:1, too"]
    assert not same_names([Source(MESSAGES[0], "class A: ..."), sources[0]])


# ---- nothing is shipped without its suite


def test_shipped_classes_pass_the_suites_for_third_parties():
    tests = classes(one for one in everything() if one.name.startswith("tests/"))
    own = classes(product())
    for base, suite in SUITES.items():
        shipped = derived(base, own)
        assert shipped
        nodes = [node for test in derived(suite, tests) for node in tests[test][1].nodes]
        checked = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert not shipped - checked, f"no class derives from {suite} for these"


# ---- the rules themselves


IN_PRODUCT = "tiers/memory/tier.py"
SAY = "say block, slot, demote or promote"
BROKEN: list[tuple[Check, str, str, list[str]]] = [
    (too_long, IN_PRODUCT, "\n" * 450 + "a", ["451: a file has at most 450 lines"]),
    (too_long, IN_PRODUCT, "\n" + "a" * 101, ["2: a line has at most 100 characters"]),
    (
        too_long,
        IN_PRODUCT,
        "class A:\n  async def f():\n" + "    pass\n" * 70,
        ["2: f has 71 lines, over 70"],
    ),
    (undocumented, IN_PRODUCT, "a = 1", ["1: no docstring"]),
    (
        own_clock_or_dice,
        IN_PRODUCT,
        "from time import sleep\ntime.time()\nimport random\nfrom random import Random, choice",
        [
            "2: time.time: a clock is injected",
            "1: time.sleep: a clock is injected",
            "3: random: a generator is injected",
            "4: random.choice: a generator is injected",
        ],
    ),
    (
        own_clock_or_dice,
        CLOCK_MAKER,
        "time.time()\ntime.time_ns()",
        ["2: time.time_ns: a clock is injected"],
    ),
    (prints, IN_PRODUCT, "def f():\n  print(1)", ["2: product code does not print"]),
    (prints, "kvladder/cli/main.py", "print(1)", []),
    (
        catches_all,
        IN_PRODUCT,
        "try: a\nexcept OSError: b\nexcept (ValueError, Exception): b\nexcept: c\n",
        [f"{line}: catches everything and does not raise it again" for line in (3, 4)],
    ),
    (catches_all, IN_PRODUCT, "try: a\nexcept BaseException: raise", []),
    (catches_all, "kvladder/runtime.py", "try: a\nexcept: b", []),
    (
        sets_from_outside,
        IN_PRODUCT,
        "a.b = 1\nself.a.b += 1\nc, a.b = 1, 2\nself.a, a.stats.b, c.a = 1, 2, 3\na.b[0] = a.c",
        ["1: sets a.b", "2: sets self.a.b", "3: sets a.b"],
    ),
    (
        banned_words,
        IN_PRODUCT,
        'a = "swap"\nSwapChunk = 1\n# swaps\ndef f():\n  """Chunks."""',
        [f"2: swap: {SAY}", f"2: chunk: {SAY}", f"3: swaps: {SAY}", f"5: chunks: {SAY}"],
    ),
    (left_to_do, IN_PRODUCT, "a = 1  # a TODO", ["1: TODO"]),
]


def test_each_rule_finds_its_offenders():
    for check, name, text, lines in BROKEN:
        expected = [f"{name}:{line}" for line in lines]
        assert offenders(check, [Source(name, text)]) == expected
