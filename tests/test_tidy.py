"""Style that matters is a test: sizes, words, layering, and nothing shipped without its suite."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKS = ("connectors", "gpu", "policy", "tiers")
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 600
FOLDER_FILES_MAX = 16
LINE_LENGTH_MAX = 100

# Where an error of any kind may be caught and not raised again, and why.
CATCHES_ALL = {
    "tiers/ladder/door.py": "turns whatever a tier says into a value",
    "tiers/ladder/gate.py": "has a task that died begin anew",
    "kvladder/runtime.py": "counts it: the loop goes on",
    "tiers/blocking.py": "hands it to whoever awaits the call",
    "tiers/isolated/child.py": "tells the process that called",
    "tiers/isolated/spawn.py": "ends with a status that says so",
    "tiers/codecs/edge.py": "has a codec's fault cost one block, and says it",
    "tiers/files/threads.py": "hands it to whoever awaits the batch",
    "gpu/copy/copier.py": "reports it with the job whose copy failed",
    "gpu/copy/cuda.py": "says it; small pages are copied as large ones are",
    "gpu/copy/streams.py": "reports it with the job whose copy failed",
    "kvladder/planning/models.py": "names it as why the rules were asked",
}
# An engine must outlive its connector.
ENGINE_EDGE = re.compile(r"connectors/(vllm\w*|sglang|trtllm)/.*\.py")

# What product code takes from outside instead of asking for it itself, and where it is made.
CLOCKS = {"time.time", "time.time_ns", "time.sleep"}
CLOCK_MAKER = "tiers/blocking.py"
TEST_KIT = "kvladder/testing/"
PRINTERS = ("kvladder/cli/",)

BANNED_WORDS = {"chunk", "chunks", "swap", "swaps", "swapped", "swapping"}
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def python_files(*folders):
    """Python files below folders of the project, each once; paths relative to the project."""
    links = tuple(f"kvladder/{name}/" for name in LINKS)
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    relative = [str(path.relative_to(ROOT)) for path in found]
    return [name for name in relative if not name.startswith(links)]


PRODUCT = python_files("kvladder", *LINKS)
EVERYTHING = [*PRODUCT, *python_files("tests", "benchmarks", "examples")]


@cache
def source(name):
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def tree(name):
    return ast.parse(source(name))


def test_there_is_something_to_check():
    assert {"kvladder/arena.py", "tiers/base.py", "policy/eviction.py"} <= set(PRODUCT)
    assert {"tests/test_tidy.py", "tests/tiers/test_files.py"} <= set(EVERYTHING)
    assert not [name for name in PRODUCT if name.startswith("kvladder/tiers/")]


def test_who_starts_vllm_is_named_where_it_is_run():
    named = re.search(r"^STARTS_VLLM := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    marks = re.compile(r"^\s*(@|pytestmark = )pytest\.mark\.vllm\b", re.MULTILINE)
    marked = [name for name in EVERYTHING if marks.search(source(name))]
    assert marked
    assert named
    assert all(name.startswith(tuple(named[1].split())) for name in marked)


# ---- packaging


@cache
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_packages_are_the_folders():
    settings = project()["tool"]["setuptools"]
    parents = {Path(name).parent.parts for name in PRODUCT}
    folders = {
        ".".join(parts if parts[0] == "kvladder" else ("kvladder", *parts)) for parts in parents
    }
    assert set(settings["packages"]) == folders
    for package in settings["packages"]:
        folder = ROOT / "kvladder" / Path(*package.split(".")[1:])
        assert (folder / "__init__.py").is_file(), package


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


@pytest.mark.parametrize("name", EVERYTHING)
def test_files_are_short_and_say_what_they_are(name):
    lines = source(name).splitlines()
    assert len(lines) <= FILE_LINES_MAX
    long = [number for number, line in enumerate(lines, 1) if len(line) > LINE_LENGTH_MAX]
    assert not long, f"lines over {LINE_LENGTH_MAX}: {long}"
    assert ast.get_docstring(tree(name)), "no docstring"


@pytest.mark.parametrize("folder", sorted({str(Path(name).parent) for name in PRODUCT}))
def test_folders_can_be_overlooked(folder):
    files = [path for pattern in ("*.py", "*.c") for path in (ROOT / folder).glob(pattern)]
    assert len(files) <= FOLDER_FILES_MAX


@pytest.mark.parametrize("name", EVERYTHING)
def test_functions_fit_a_screen(name):
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES_MAX, f"{node.name} has {length} lines"


# ---- what product code does not do


def dotted(node):
    """``a.b.c`` of an attribute chain, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def imported(name):
    """Modules and ``module.name`` that a file imports, anywhere in it."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("name", PRODUCT)
def test_product_code_asks_no_clock_and_no_dice_of_its_own(name):
    used = {dotted(node) for node in ast.walk(tree(name)) if isinstance(node, ast.Attribute)}
    used |= set(imported(name))
    clocks = used & CLOCKS
    assert not clocks or (name == CLOCK_MAKER and clocks == {"time.time"}), clocks
    dice = {use for use in imported(name) if use.split(".")[0] == "random"}
    assert dice <= {"random.Random"}, "a generator is injected"


@pytest.mark.parametrize("name", PRODUCT)
def test_product_code_does_not_print(name):
    if name.startswith(PRINTERS):
        return
    calls = [dotted(node.func) for node in ast.walk(tree(name)) if isinstance(node, ast.Call)]
    assert "print" not in calls


def catches_all(handler):
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or dotted(kind) in {"Exception", "BaseException"} for kind in kinds)


@pytest.mark.parametrize("name", PRODUCT)
def test_only_the_edges_catch_everything(name):
    if name in CATCHES_ALL or ENGINE_EDGE.fullmatch(name) or name.startswith(TEST_KIT):
        return
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.ExceptHandler) and catches_all(node):
            last = node.body[-1]
            raises = isinstance(last, ast.Raise) and last.exc is None
            assert raises, f"line {node.lineno} catches everything and does not raise it again"


def test_who_catches_everything_exists():
    assert set(CATCHES_ALL) <= set(PRODUCT)


def set_from_outside(module):
    """Attributes that a module sets of objects whose class it does not define.

    Counters are: whoever sees something happen counts it in the ``stats``.
    """
    stores = [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    ]
    own = {node.attr for node in stores if dotted(node.value) == "self"}
    fields = [node.target for node in ast.walk(module) if isinstance(node, ast.AnnAssign)]
    own |= {field.id for field in fields if isinstance(field, ast.Name)}
    for node in stores:
        owner = dotted(node.value)
        if node.attr not in own and owner.rsplit(".", 1)[-1].lstrip("_") != "stats":
            yield f"line {node.lineno} sets {ast.unparse(node)}"


def test_what_sets_attributes_from_outside_is_found():
    code = "a.b = 1\nself.a.b += 1\nc, a.b = 1, 2\nself.a, a.stats.b, c.a = 1, 2, 3\na.b[0] = a.c"
    found = list(set_from_outside(ast.parse(code)))
    assert found == ["line 1 sets a.b", "line 2 sets self.a.b", "line 3 sets a.b"]


CHANGE_THEMSELVES = ("gpu/", "kvladder/device/", "tiers/ladder/")


@pytest.mark.parametrize("name", [name for name in PRODUCT if name.startswith(CHANGE_THEMSELVES)])
def test_objects_are_changed_by_their_own_methods(name):
    assert not list(set_from_outside(tree(name)))


# ---- words


def words(name):
    """``(line, word)`` of what a file names or explains: identifiers, comments, docstrings."""
    docs = set()
    for node in ast.walk(tree(name)):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                docs.add(child.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source(name)).readline):
        is_doc = token.type == tokenize.STRING and token.start[0] in docs
        if is_doc or token.type in {tokenize.NAME, tokenize.COMMENT}:
            for word in _WORD.findall(token.string):
                yield token.start[0], word.lower()


@pytest.mark.parametrize("name", PRODUCT)
def test_the_words_of_the_glossary_are_used(name):
    used = [f"line {line}: {word}" for line, word in words(name) if word in BANNED_WORDS]
    assert not used, "say block, slot, demote or promote"


@pytest.mark.parametrize("name", EVERYTHING)
def test_nothing_is_left_to_do(name):
    if name == "tests/test_tidy.py":
        return
    assert not re.search(r"#.*\b(TODO|FIXME|XXX)\b", source(name))


# ---- nothing is shipped without its suite


@cache
def classes(*names):
    """``class name -> (names of its bases, file)`` of the classes in files."""
    found = {}
    for name in names:
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.ClassDef):
                bases = [
                    dotted(base.value if isinstance(base, ast.Subscript) else base)
                    for base in node.bases
                ]
                found[node.name] = ([base.rpartition(".")[2] for base in bases], name)
    return found


def derived(base, known):
    """Classes below ``base``, at any distance."""
    found: set[str] = set()
    while more := {c for c, (bases, _) in known.items() if {base, *found} & set(bases)} - found:
        found |= more
    return found


@pytest.mark.parametrize(
    ("base", "suite"),
    [
        ("Tier", "TierTests"),
        ("EvictionPolicy", "PolicyTests"),
        ("Codec", "CodecTests"),
        ("ResourceHandler", "HandlerTests"),
    ],
)
def test_what_is_shipped_passes_the_suite_for_third_parties(base, suite):
    shipped = derived(base, classes(*PRODUCT))
    assert shipped
    tests = classes(*python_files("tests"))
    checked = set()
    for test in derived(suite, tests):
        module = tree(tests[test][1])
        checked |= {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
    assert not shipped - checked, f"no class derives from {suite} for these"
