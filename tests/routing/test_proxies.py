"""The example proxies between clients and engines: the requests that pass through them."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
aiohttp = pytest.importorskip("aiohttp")
from aiohttp import web  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body")
EXAMPLES = Path(__file__).parents[2] / "examples"
LONG = list(range(1_000_000))
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"kvladder_example_{name}", EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    """Serve an application within the context."""
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def engine(answer: Answer) -> AsyncIterator[str]:
    app = web.Application(client_max_size=0)
    app.router.add_post("/v1/completions", answer)
    async with serving(app) as where:
        yield where


async def counts(request: web.Request) -> web.StreamResponse:
    asked = await request.json()
    return web.json_response({"tokens": len(asked["prompt"])})


async def ask(where: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{where}/v1/completions", json={"prompt": LONG}) as answer,
    ):
        return answer.status, await answer.json() if answer.status == 200 else None


def in_front(name: str, where: str, first: str = "") -> tuple[Any, Any]:
    """One of the examples in front of an engine, and its application."""
    example = load(name)
    if name == "router.py":
        one = example.Router([example.Engine(where, "inproc://none", "inproc://none")], blind=True)
    else:
        one = example.Proxy(first or where, where)
    return example, one


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("name", ["prefill_decode.py", "router.py"])
async def test_proxies_pass_long_prompts_and_slow_answers(name: str) -> None:
    async with engine(counts) as where:
        example, one = in_front(name, where)
        async with serving(example.application(one)) as front:
            assert await ask(front) == (200, {"tokens": len(LONG)})
            assert one._session.timeout.total is None
            assert one._session.timeout.sock_connect is not None


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("router.py", "--engine a,e,r --engine b,e,r", "routes requests to a, b"),
        ("prefill_decode.py", "--prefill a --decode b", "prefills on a, decodes on b"),
    ],
)
def test_an_example_prints_where_and_what_it_serves(
    name: str,
    arguments: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = load(name)
    monkeypatch.setattr(example.web, "run_app", lambda *_, **__: None)
    monkeypatch.setattr("sys.argv", [name, "--port", "1", *arguments.split()])
    example.main()
    assert capsys.readouterr().out == f"http://127.0.0.1:1 {says}\n"


@pytest.mark.slow
@pytest.mark.real
async def test_a_prompt_beyond_the_timeout_is_computed_by_the_other_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = asyncio.Event()

    async def hangs(request: web.Request) -> web.StreamResponse:
        await ends.wait()
        return web.Response()

    async with engine(counts) as where, engine(hangs) as first:
        example, one = in_front("prefill_decode.py", where, first)
        async with serving(example.application(one)) as front:
            post = one._session.post
            short = aiohttp.ClientTimeout(total=0.2)

            def posted(url: str, **more: Any) -> Any:
                return post(url, **more, **({"timeout": short} if url.startswith(first) else {}))

            monkeypatch.setattr(one._session, "post", posted)
            try:
                assert await ask(front) == (200, {"tokens": len(LONG)})
            finally:
                ends.set()


@asynccontextmanager
async def caches(heard: list[tuple[str, str, list[str]]]) -> AsyncIterator[list[str]]:
    """Two ports that take hints; ``heard`` gets their names, tokens and sessions."""

    def application(name: str) -> web.Application:
        async def answer(request: web.Request) -> web.StreamResponse:
            sent = await request.json()
            told = request.headers["Authorization"]
            heard.append((name, told, [one["payload"]["session"] for one in sent["actions"]]))
            if told != "Bearer right":
                return web.json_response({"error": "a wrong token"}, status=401)
            outcomes = [{"action_id": a["action_id"], "outcome": name} for a in sent["actions"]]
            return web.json_response({"hints": outcomes})

        app = web.Application()
        app.router.add_post("/hints", answer)
        return app

    async with serving(application("a")) as a, serving(application("b")) as b:
        yield [a, b]


def hints(*sessions: str) -> dict[str, Any]:
    actions = [
        {"action_id": f"{n}", "action_type": "pin", "payload": {"session": name}}
        for n, name in enumerate(sessions)
    ]
    return {"protocol_version": "0.1", "message_id": "m", "actions": actions}


@pytest.mark.real
async def test_a_router_hands_hints_to_the_engines_that_served_their_sessions() -> None:
    heard: list[tuple[str, str, list[str]]] = []
    example = load("router.py")
    async with caches(heard) as ports:
        engines = [
            example.Engine(name, f"inproc://{name}", f"inproc://{name}", port)
            for name, port in zip(("http://a", "http://b"), ports, strict=True)
        ]
        router = example.Router(engines)
        for session, engine in (("one", "http://a"), ("two", "http://b"), ("three", "http://a")):
            asked = {"kv_transfer_params": {"kvladder": {"session": session}}}
            router._note(asked, engine)
        async with (
            serving(example.application(router)) as front,
            aiohttp.ClientSession(headers={"Authorization": "Bearer right"}) as session,
        ):

            async def post(body: Any, **headers: str) -> tuple[int, Any]:
                async with session.post(f"{front}/hints", json=body, headers=headers) as answer:
                    return answer.status, await answer.json()

            status, told = await post(hints("two", "one", "four", "three"))
            assert status == 200
            assert [one["outcome"] for one in told["hints"]] == ["b", "a", "missing", "a"]
            assert [one["action_id"] for one in told["hints"]] == ["0", "1", "2", "3"]
            assert sorted(heard) == [
                ("a", "Bearer right", ["one", "three"]),
                ("b", "Bearer right", ["two"]),
            ]
            assert await post(hints("one"), Authorization="Bearer wrong") == (
                401,
                {"error": "a wrong token"},
            )
            bad: list[Any] = [{}, [], {"actions": [3]}, {"actions": [{"action_id": "x"}]}]
            for wrong in bad:
                status, told = await post(wrong)
                assert (status, told["error"].startswith("not an envelope")) == (400, True)
