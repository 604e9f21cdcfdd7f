"""The harness of ``make bench-clients``: result files, the proxy, comparisons, and failures."""

from __future__ import annotations

import http.client
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from benchmarks import foreign
from benchmarks.clients import __main__ as command
from benchmarks.clients import turns
from benchmarks.clients.inputs import (
    BLOCK_TOKENS,
    MODEL,
    TOKENS_MAX,
    conversations,
    make_hub,
    make_tokenizer,
    merges,
    write_trace,
)
from benchmarks.clients.programs import HUB, PROGRAMS, Program, Summary, Unreadable
from benchmarks.clients.proxy import BROKEN, Exchange, RecordingProxy, digest_of
from benchmarks.clients.servers import ALONE, OURS
from benchmarks.clients.turns import ClientFailed, Outcome, Turn, compared, in_turns, run_once
from benchmarks.foreign import Absent, into_folder
from kvladder.traces import read_trace
from tests.patience import PATIENCE_S

SAMPLES = Path(__file__).parent / "samples"
FILES = {
    "vllm bench serve": "result.json",
    "aiperf": "profile_export_aiperf.json",
    "lmcache bench engine": "bench_summary.json",
}
KEPT = {
    "vllm bench serve": (24, 53.15, 228.75, 1296.95),
    "aiperf": (24, 55.16, 196.37, 1301.61),
    "lmcache bench engine": (24, 145.74, 242.68, 3294.74 + 38.42),
}
"""What the kept files of real runs say."""
WORDS = ("ba", "ke", " ", "lo")


# ---- results of clients


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.title)
def test_the_results_of_each_client_are_read(program: Program) -> None:
    found = program.read(SAMPLES)
    completed, p50_ms, p99_ms, tokens_per_s = KEPT[program.name]
    assert (found.completed, found.failed) == (completed, 0)
    assert found.p50_ms == pytest.approx(p50_ms, abs=0.01)
    assert found.p99_ms == pytest.approx(p99_ms, abs=0.01)
    assert found.tokens_per_s == pytest.approx(tokens_per_s, abs=0.01)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.title)
def test_results_that_miss_a_figure_are_unreadable(program: Program, tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match=FILES[program.name]):
        program.read(tmp_path)
    (tmp_path / FILES[program.name]).write_text("{}")
    with pytest.raises(Unreadable, match="no (number|results)"):
        program.read(tmp_path)


def test_commands_name_the_server_and_the_folder_of_results() -> None:
    for program in PROGRAMS:
        said = program.command("http://127.0.0.1:1", "there")
        assert "http://127.0.0.1:1" in said, program.title
        assert "there" in said, program.title
    assert len({program.title for program in PROGRAMS}) == len(PROGRAMS)


def test_a_package_that_cannot_be_installed_is_named(tmp_path: Path) -> None:
    with pytest.raises(Absent, match="absent"):
        into_folder(tmp_path / "place", [str(tmp_path / "absent.whl")])


def test_an_environment_with_other_packages_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(foreign, "_run", lambda command: made.append(command[-1]))
    for wanted in (["one==1"], ["one==1"], ["one==2"]):
        assert foreign.into_environment(tmp_path, wanted) == tmp_path / "bin"
    assert made == [str(tmp_path), "one==1", str(tmp_path), "one==2"]


# ---- the proxy


class Stub(BaseHTTPRequestHandler):
    """An engine: ``prompt`` or the last message selects the form of the answer."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002 - the base's name

    def do_GET(self) -> None:
        self._send(b'{"data": []}', "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        form = body.get("prompt") or body["messages"][-1]["content"]
        if form == "refused":
            self._send(b'{"error": "too long"}', "application/json", 400)
        elif body.get("stream"):
            self._stream(form, is_chat="messages" in body)
        else:
            said = {"text": "".join(WORDS), "finish_reason": "length"}
            whole = {"choices": [said], "usage": USAGE}
            self._send(json.dumps(whole).encode(), "application/json")

    def _stream(self, form: str, *, is_chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        text = b"".join(events(form, is_chat=is_chat))
        text = text[: len(text) // 2] if form == "broken" else text
        size = 7 if form == "cut into pieces" else len(text)
        for at in range(0, len(text), size):
            piece = text[at : at + size]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        if form == "broken":
            self.close_connection = True
            return
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, body: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 32},
}


def events(form: str, *, is_chat: bool) -> Iterator[bytes]:
    """Yield the events of a streamed answer."""
    for number, word in enumerate(WORDS):
        said: dict[str, Any] = {"delta": {"content": word}} if is_chat else {"text": word}
        said["finish_reason"] = "length" if number == len(WORDS) - 1 else None
        yield b"data: %b\n\n" % json.dumps({"choices": [said]}).encode()
        if form == "an error":
            yield b'data: {"error": {"message": "the engine ended"}}\n\n'
            return
    yield b"data: %b\n\n" % json.dumps({"choices": [], "usage": USAGE}).encode()
    yield b"data: [DONE]\n\n"


@pytest.fixture(scope="module")
def engine() -> Iterator[int]:
    """Yield the port of a server that answers like an engine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def ask(url: str, **body: Any) -> bytes:
    """Return the answer's bytes."""
    path = "chat/completions" if "messages" in body else "completions"
    data = json.dumps({"model": "m", "max_tokens": 4, "temperature": 0, **body}).encode()
    asked = Request(f"{url}/v1/{path}", data, {"Content-Type": "application/json"})
    with urlopen(asked, timeout=PATIENCE_S) as answer:
        whole: bytes = answer.read()
    return whole


def chat(form: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": form}]


def test_streamed_answers_pass_unchanged_and_are_recorded(engine: int) -> None:
    with RecordingProxy(engine) as proxy:
        for form in ("whole", "cut into pieces"):
            got = ask(proxy.url, prompt=form, stream=True)
            assert got == b"".join(events(form, is_chat=False))
        ask(proxy.url, messages=chat("whole"), stream=True)
        ask(proxy.url, prompt="whole", stream=False)
    whole, pieces, in_chat, at_once = proxy.exchanges()
    assert whole.answer == pieces.answer == in_chat.answer == at_once.answer
    assert len({whole.asked, pieces.asked, in_chat.asked}) == 3
    assert whole.asked == at_once.asked
    for one in proxy.exchanges():
        assert one.is_whole
        assert 0 < one.first_s <= one.total_s
        assert (one.prompt_tokens, one.cached_tokens, one.temperature) == (40, 32, 0)


def test_other_requests_pass_and_are_not_recorded(engine: int) -> None:
    with RecordingProxy(engine) as proxy:
        with urlopen(f"{proxy.url}/v1/models", timeout=PATIENCE_S) as answer:
            assert answer.read() == b'{"data": []}'
        asked = Request(f"{proxy.url}/tokenize", json.dumps({"prompt": "a"}).encode())
        with urlopen(asked, timeout=PATIENCE_S) as answer:
            assert json.load(answer)["usage"] == USAGE
        assert proxy.exchanges() == []


def test_refused_failed_and_broken_answers_are_recorded_as_such(engine: int) -> None:
    with RecordingProxy(engine) as proxy:
        with pytest.raises(OSError, match="400"):
            ask(proxy.url, prompt="refused")
        ask(proxy.url, prompt="an error", stream=True)
        with pytest.raises(http.client.HTTPException):
            ask(proxy.url, prompt="broken", stream=True)
    assert [one.status for one in proxy.exchanges()] == [400, BROKEN, BROKEN]
    assert not any(one.is_whole for one in proxy.exchanges())


def test_only_what_determines_the_answer_names_a_request() -> None:
    body = {"model": "m", "prompt": [1, 2], "max_tokens": 4, "temperature": 0.0, "stream": True}
    other = {**body, "stream_options": {"include_usage": True}, "user": "x", "model": "n"}
    assert digest_of(body) == digest_of(other)
    for changed in ({"prompt": [1, 3]}, {"max_tokens": 5}, {"temperature": 1.0}):
        assert digest_of(body) != digest_of({**body, **changed})


# ---- comparisons


def exchange(
    asked: str, answer: str = "x", first_s: float = 0.1, status: int = 200, cached: int = 0
) -> Exchange:
    return Exchange(asked, answer, status, first_s, first_s + 1, 100, cached)


def test_the_nth_requests_for_the_same_are_a_pair() -> None:
    alone = [exchange("a", "1"), exchange("b"), exchange("a", "2"), exchange("only here")]
    ours = [exchange("a", "1"), exchange("a", "2"), exchange("b", "other"), exchange("d")]
    found = compared(alone, ours)
    assert (found.pairs, found.differ, found.unpaired) == (3, 1, 2)


def test_failed_requests_stay_unpaired() -> None:
    found = compared([exchange("a")], [exchange("a", status=BROKEN)])
    assert (found.pairs, found.differ, found.unpaired) == (0, 0, 2)


@pytest.mark.parametrize(
    ("alone_s", "ours_s", "late"),
    [(0.1, 0.1119, 0), (0.1, 0.1121, 1), (0.001, 0.0030, 0), (0.001, 0.0032, 1), (0.1, 0.01, 0)],
)
def test_a_first_token_is_late_above_the_limit(alone_s: float, ours_s: float, late: int) -> None:
    pair = compared([exchange("a", first_s=alone_s)], [exchange("a", first_s=ours_s)])
    assert pair.late == late


def turn(*first_s: float, p50_ms: float = 1.0, cached: int = 0) -> Turn:
    listed = [exchange(f"{n}", first_s=each, cached=cached) for n, each in enumerate(first_s)]
    return Turn(Summary(len(listed), 0, p50_ms, 2.0, 3.0), listed)


def test_the_limit_begins_after_the_second_turn_and_noise_is_counted_beside_it() -> None:
    outcome = Outcome("a client")
    outcome.turns[ALONE] = [turn(0.1, 0.1), turn(0.1, 0.1), turn(0.1, 0.1), turn(0.2, 0.1)]
    outcome.turns[OURS] = [turn(9, 9), turn(9, 9), turn(0.1, 9), turn(0.2, 0.05, cached=50)]
    late, noise = outcome.late(), outcome.noise()
    assert (late.late, late.pairs) == (1, 4)
    assert (noise.late, noise.pairs) == (1, 4)
    assert (outcome.late_in_the_middle().late, outcome.late_in_the_middle().pairs) == (1, 2)
    assert outcome.answers().pairs == 8
    assert outcome.cached(ALONE) == 0
    assert outcome.cached(OURS) == pytest.approx(1 / 6)


def test_figures_are_medians_after_the_first_turn() -> None:
    outcome = Outcome("a client")
    outcome.turns[ALONE] = [turn(p50_ms=900), turn(p50_ms=3), turn(p50_ms=1), turn(p50_ms=2)]
    assert outcome.figure(ALONE, "p50_ms") == 2


# ---- runs


class Script(Program):
    """A client in Python: it asks through the proxy and keeps its figures, or fails."""

    name = "script"

    def __init__(self, workload: str, code: str) -> None:
        self.workload = workload
        self._code = code

    def command(self, url: str, out: str) -> list[str]:
        return [sys.executable, "-c", self._code, url, out]

    def read(self, out: Path) -> Summary:
        return Summary(**json.loads((out / "figures").read_text()))


ASKS = """
import json, pathlib, sys, urllib.request
url, out = sys.argv[1:]
body = {"prompt": "whole", "max_tokens": 4, "temperature": 0, "stream": True}
asked = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode())
urllib.request.urlopen(asked).read()
figures = {"completed": 1, "failed": 0, "p50_ms": 1, "p99_ms": 2, "tokens_per_s": 3}
pathlib.Path(out, "figures").write_text(json.dumps(figures))
"""
FAILS = "import sys; print('first line'); sys.exit('no tokenizer here')"


class Engine:
    """A server as turns use it; ``log`` lists what was called."""

    def __init__(self, name: str, port: int, log: list[str]) -> None:
        self.name = name
        self.port = port
        self.log = log

    def reset(self) -> None:
        self.log.append(self.name)

    def freeze(self) -> None:
        self.log.append("frozen")

    def thaw(self) -> None:
        self.log.append("thawed")


@pytest.fixture
def servers(engine: int) -> dict[str, Engine]:
    log: list[str] = []
    return {name: Engine(name, engine, log) for name in (ALONE, OURS)}


@pytest.mark.slow
def test_servers_take_turns_and_each_begins_without_the_engines_cache(
    servers: dict[str, Engine], tmp_path: Path
) -> None:
    outcome = Outcome("a client")
    in_turns(Script("asks", ASKS), servers, tmp_path, 3, outcome)
    order = [ALONE, OURS, OURS, ALONE, ALONE, OURS]
    assert servers[ALONE].log == [step for name in order for step in ("thawed", name, "frozen")]
    answers = outcome.answers()
    assert (answers.pairs, answers.differ, answers.unpaired) == (3, 0, 0)
    assert outcome.late().pairs == 1
    assert outcome.figure(OURS, "p99_ms") == 2
    kept = json.loads((tmp_path / "out/script-asks/3-kvladder/exchanges.json").read_text())
    assert [one["cached_tokens"] for one in kept] == [32]


def test_a_client_that_fails_is_named_with_its_last_lines_and_the_others_run(
    servers: dict[str, Engine], tmp_path: Path
) -> None:
    programs = [Script("fails", FAILS), Script("asks", ASKS)]
    outcomes = [Outcome(program.title) for program in programs]
    for program, outcome in zip(programs, outcomes, strict=True):
        command.attempt(program, servers, tmp_path, 3, outcome)
    failed, passed = outcomes
    assert failed.failure == "exited with 1: first line / no tokenizer here"
    assert passed.failure == ""
    text = command.page(programs, outcomes, 3)
    assert "- **script fails** failed: exited with 1" in text
    assert "- load average: " in text
    assert "| script asks | p99, ms | 2.0 | 2.0 | 1.00 |" in text
    assert "| script asks | 3 | 0 | 0 | 80% | 80% |" in text
    assert "script fails |" not in text


def test_a_client_that_does_not_end_is_ended(
    servers: dict[str, Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "CLIENT_S_MAX", 0.1)
    with pytest.raises(ClientFailed, match="did not end"):
        run_once(Script("waits", "input = open('/dev/zero').read(1); import time; time.sleep(1e6)"),
                 servers[ALONE], tmp_path, "out")  # fmt: skip


def test_a_client_that_cannot_be_installed_does_not_start_the_engines(tmp_path: Path) -> None:
    class Missing(Script):
        def install(self) -> str:
            raise Absent("no distribution for this Python")

    [outcome] = command.measured([Missing("is missing", "")], tmp_path / "not made", 3)
    assert outcome.failure == "cannot be installed: no distribution for this Python"
    assert not (tmp_path / "not made").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "nothing"], "no client has nothing in its title; there are: vllm bench serve"),
        (["--turns", "2"], "--turns 2: the limit needs at least 3"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        command.main(arguments)
    assert raised.value.code == 2
    assert said in capsys.readouterr().err


# ---- inputs


def test_the_trace_is_mooncakes_and_fits_the_model(tmp_path: Path) -> None:
    lines = conversations()
    path = tmp_path / "trace.jsonl"
    write_trace(path, lines)
    trace = read_trace(path, block_tokens=BLOCK_TOKENS)
    assert len(trace.requests) == len(lines) == 24
    assert not trace.warnings
    assert trace.blocks > 3 * trace.unique
    assert max(one.input_tokens + one.output_tokens for one in trace.requests) < TOKENS_MAX
    assert conversations() == lines


def test_the_hub_has_the_model_as_its_only_revision(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    (tmp_path / MODEL).mkdir()
    (tmp_path / MODEL / "config.json").write_text("{}")
    make_hub(tmp_path / HUB, tmp_path / MODEL)
    found = hub.snapshot_download(MODEL, cache_dir=tmp_path / HUB / "hub", local_files_only=True)
    assert (Path(found) / "config.json").read_text() == "{}"


@pytest.mark.slow
def test_text_survives_the_tokenizer_and_most_words_are_one_token(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    size = make_tokenizer(tmp_path)
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert made.get_vocab_size() == size
    words = [one[1:] + other for one, other in merges()[-10_000::97]]
    text = " " + " ".join(words)
    assert len(made.encode(text).ids) == len(words)
    for said in (text, "Session 3. You are a helpful assistant.\nuser: hi hi"):
        assert made.decode(made.encode(said).ids) == said
