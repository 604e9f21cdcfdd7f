"""The claims of ``make demo`` are true."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from tests.patience import RUN_S
from tests.vllm.harness import HERE, Started, environment

DEMO = HERE.parents[1] / "examples" / "demo.py"


def test_every_claim_of_the_demo_holds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo starts the first process of each kind; the others are forked from one with vLLM."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", [str(DEMO)])
    module = runpy.run_path(str(DEMO))
    demo: Any = module["Demo"]
    begin, kinds = demo.run, set[str]()

    def run(self: Any, what: str, *arguments: str) -> None:
        if arguments[0] not in kinds:
            kinds.add(arguments[0])
            begin(self, what, *arguments)
            return
        process = Started(self.folder, [str(DEMO), *arguments], environment(), fresh=False)
        code = process.process.wait(RUN_S)
        process.kill()
        assert code == 0, process.log.read_text()[-4000:]

    monkeypatch.setattr(demo, "run", run)
    code = module["main"]()
    shown = capsys.readouterr().out
    assert code == 0, shown[-4000:]
    assert kinds == {"--model", "--engine"}
    assert "same output as without connector" in shown
    assert "flipped byte: detected" in shown
