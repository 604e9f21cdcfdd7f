"""The page of a running cache in a real browser: what it shows, to whom, and its purge."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

from kvladder import open_cache
from tests.kit.browser import CHROMIUM, browser
from tests.unit.test_http_port import LAYOUT, TOKEN, port_of, save, sent, settings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, which .ci/venv installs"),
]
SHOWN = "document.getElementById('link')?.textContent === 'live'"
SECTIONS = {
    "Now", "Ladder, hottest level first", "Hits and speed by level", "Queues and breakers",
    "Drops and misses by reason", "Last notices", "Purge a cache salt",
    "Everything that is counted",
}  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@contextmanager
def shown(page, tmp_path, *, levels=1, shadow=None, **look):
    """Open a cache with so many levels below host, and its page."""
    below = [
        {"type": "memory", "name": f"level{n}", "capacity": "1 MiB", "when": "commit"}
        for n in range(levels)
    ]
    whole = {**settings(tmp_path), "tiers": [{"type": "host"}, *below]}
    if shadow:
        whole["shadow"] = shadow
    page.problems.clear()
    page.requested.clear()
    with open_cache(whole, layout=LAYOUT) as cache:
        page.look(**look)
        page.go(f"http://127.0.0.1:{port_of(tmp_path)}/")
        page.until(SHOWN)
        yield cache
        page.run("source.close()")


def text(page, name):
    return page.run(f"document.getElementById({json.dumps(name)}).innerText")


@pytest.mark.parametrize("levels", [0, 1, 19])
@pytest.mark.parametrize("width", [1280, 360])
def test_it_shows_any_number_of_levels_at_any_width(page, tmp_path, levels, width):
    with shown(page, tmp_path, levels=levels, width=width) as cache:
        save(cache, range(5))
        names = ["host", *(f"level{n}" for n in range(levels))]
        page.until("document.getElementById('ladder').innerText.includes('5 blocks')")
        assert page.run("document.querySelectorAll('.rung').length") == len(names)
        rows = "[...document.querySelectorAll('#flow tbody tr')].map(r => r.cells[0].innerText)"
        assert page.run(rows) == names
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), "it does not scroll"
    assert page.problems == []


def test_a_cache_without_any_levels_is_said_to_have_none(page, tmp_path):
    with shown(page, tmp_path):
        page.run(
            "source.close(), past.length = 0, window.bare = {stats: {}, notices: [], levels: []}"
        )
        page.run("show({...bare, time_s: 1, open_s: 1, sessions: 0, version: 'x', block_bytes: 1})")
        assert text(page, "ladder") == "This cache has no levels."
        assert "no levels" in text(page, "flow")
    assert page.problems == []


def test_it_is_live_and_shows_losses_notices_and_latencies(page, tmp_path):
    with shown(page, tmp_path) as cache:
        assert "none so far" in text(page, "losses")
        cache._stack.shared.notices.say("trial", "tier <b>level0</b> failed & was left out")
        cache._stack.levels[0].stats.drop("queue", 30)
        cache._stack.levels[0].stats.timeouts += 1
        save(cache, range(50))
        page.until("document.getElementById('losses').innerText.includes('dropped: queue')")
        assert "timeouts" in text(page, "losses")
        page.until("document.getElementById('notices').innerText.includes('failed & was left')")
        assert "<b>level0</b>" in text(page, "notices"), "markup of a notice is text"
        page.until("/≤ [0-9.]+ (µs|ms|s)/.test(document.getElementById('flow').innerText)")
        assert "50 blocks" in text(page, "ladder")
    assert page.problems == []


@pytest.mark.parametrize("width", [1280, 360])
def test_it_shows_what_other_sizes_would_bring(page, tmp_path, width):
    prices = {"memory": 3, "gpu": 2.5}
    shadow = {"enabled": True, "prefill": 2000, "prices": prices}
    with shown(page, tmp_path, shadow=shadow, width=width) as cache:
        keys = save(cache, range(40))
        for _ in range(2):
            fetch = cache.fetch(keys)
            fetch.wait()
            fetch.release()
        want = cache.stats()["shadow"]["hit_ratio"]["host"]
        rows_of = "[...document.querySelectorAll('#sizes tbody tr')]"
        cells = f"{rows_of}.map(r => [...r.cells].map(c => c.innerText))"
        page.until(f"{cells}[0][2] !== '0.0 %'")
        rows = page.run(cells)
        want = cache.stats()["shadow"]["hit_ratio"]["host"]
        assert [row[:2] for row in rows[:4]] == [["host", f"{size} times"] for size in want]
        assert [row[2] for row in rows[:4]] == [f"{100 * ratio:.1f} %" for ratio in want.values()]
        assert any(row[1] == "1 times" and "/" in row[-1] for row in rows)
        heads = page.run("[...document.querySelectorAll('#sizes thead th')].map(c => c.innerText)")
        assert "cost in a month" in heads
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), "it does not scroll"
        roles = page.roles()
        assert ("region", "What other sizes would bring") in roles
    assert page.problems == []


def test_without_a_shadow_nothing_is_said_of_other_sizes(page, tmp_path):
    with shown(page, tmp_path):
        assert page.run("document.getElementById('shadow').hidden")


def test_it_says_when_the_cache_has_ended(page, tmp_path):
    with shown(page, tmp_path):
        pass
    with shown(page, tmp_path) as cache:
        cache.close()
        page.until("document.getElementById('link').textContent.startsWith('not connected')")


def test_a_salt_is_purged_by_keyboard_after_a_second_question(page, tmp_path):
    with shown(page, tmp_path) as cache:
        red, blue = save(cache, range(3), "red"), save(cache, range(3, 5), "blue")
        for answer in ("keep", "remove"):
            page.run("{const it = document.getElementById('salt'); it.value = ''; it.focus()}")
            page.write("red")
            page.press("Tab")
            page.run("document.activeElement.value = ''")
            page.write(TOKEN)
            page.press("Tab")
            page.press("Enter")
            page.until("document.getElementById('sure').open")
            assert text(page, "sure-salt") == "red"
            assert page.run("document.activeElement.value") == "no", "the safe answer is first"
            if answer == "remove":
                page.press("Tab")
            page.press("Enter")
            page.until("!document.getElementById('sure').open")
            if answer == "keep":
                page.until("document.getElementById('result').innerText === 'nothing was removed'")
                assert cache.lookup(red).total == 3
        page.until(
            "document.getElementById('result').innerText.startsWith('removed blocks: host 3')"
        )
        assert (cache.lookup(red).total, cache.lookup(blue).total) == (0, 2)
    assert page.problems == []


def test_a_wrong_token_is_refused_and_said(page, tmp_path):
    with shown(page, tmp_path) as cache:
        red = save(cache, range(3), "red")
        page.run("document.getElementById('salt').value = 'red'")
        page.run("document.getElementById('token').value = 'wrong'")
        page.run("document.getElementById('purge').requestSubmit()")
        page.run("document.querySelector('dialog button[value=yes]').click()")
        page.until("document.getElementById('result').innerText.startsWith('refused: wrong')")
        assert cache.lookup(red).total == 3
    assert len(page.problems) == 1, "the browser reports the status"
    assert "401" in page.problems[0]


def test_a_screen_reader_finds_landmarks_tables_and_meters(page, tmp_path):
    with shown(page, tmp_path) as cache:
        save(cache, range(5))
        page.until("document.getElementById('ladder').innerText.includes('5 blocks')")
        roles = page.roles()
    assert {("main", ""), ("banner", "")} <= roles
    assert {name for role, name in roles if role == "region"} >= SECTIONS
    assert {("meter", "host filled"), ("meter", "level0 filled")} <= roles
    assert {name for role, name in roles if role == "columnheader"} >= {"level", "hit rate"}
    assert {name for role, name in roles if role == "rowheader"} >= {"host", "level0"}
    assert len([role for role, _ in roles if role == "status"]) >= 1
    unnamed = {role for role, name in roles if role in ("button", "textbox", "table") and not name}
    assert unnamed == set()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_all_text_has_enough_contrast(page, tmp_path, dark):
    with shown(page, tmp_path, dark=dark):
        low = page.run(CONTRAST)
    assert low == []


CONTRAST = """(() => {
  const rgb = (c) => c.match(/[0-9.]+/g).map(Number);
  const light = (c) => rgb(c).slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const back = (e) => { for (; e; e = e.parentElement) {
    const c = getComputedStyle(e).backgroundColor; if (rgb(c)[3] !== 0) return c; } };
  const found = [];
  const look = (e) => {
    const [a, b] = [light(getComputedStyle(e).color), light(back(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) found.push([e.tagName, e.className, e.textContent]);
  };
  document.querySelectorAll('body *').forEach((e) => {
    if ([...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) look(e); });
  const words = document.getElementById('about');
  for (const cls of ['bad', 'good', 'warn', 'dim']) { words.className = cls; look(words); }
  return found;
})()"""


def test_a_browser_runs_only_the_pages_own_script_and_asks_no_other_server(page, tmp_path):
    with shown(page, tmp_path):
        port = port_of(tmp_path)
        _, headers, body = sent(port, "/")
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "unsafe" not in policy
        assert headers["X-Frame-Options"] == "DENY"
        assert len(body) < 30_000
        own = f"http://127.0.0.1:{port}/"
        assert {url.removeprefix(own) for url in page.requested if "://" in url} == {"", "events"}
        assert page.problems == []
        page.run(
            "document.head.append(Object.assign(document.createElement('script'),"
            " {textContent: 'window.evil = 1'}))"
        )
        assert page.run("window.evil") is None
        page.until("true")
    assert any("Content Security Policy" in one for one in page.problems)
