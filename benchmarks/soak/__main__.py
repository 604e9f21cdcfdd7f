"""Two real vLLM over every kind of tier, whose far ends and networks fail one after the other.

    python -m benchmarks.soak --minutes 30 --seed 1 --out NAME.md --report NAME.html

Each answer is compared with that of a vLLM without kvladder, at temperature 0. The seed determines
the prompts and the order of the faults. It exits with 1 if an answer differs, a request fails, a
level does not serve again in time, or a slot stays held. With ``--kills`` only engines are killed,
over a level of files each: two minutes, and the starts of three vLLM.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random

from benchmarks.machine import RESULTS, machine
from benchmarks.soak.page import GIVEN_UP_S, Held, Outcome, Restart, Struck, html, markdown
from benchmarks.soak.stage import Fault, Stage
from benchmarks.soak.users import LAG_MAX, SoakServer, Teller, Users, Watcher, server
from benchmarks.stopping import exit_on_sigterm
from kvladder.report.page import write
from tests.kit.processes import family
from tests.patience import until
from tests.vllm.harness import make

ENGINES = ("first", "second")
USERS_EACH = 2
BETWEEN_S = 2.0
"""Time without a fault before the next one."""
HELD_S = 60.0
"""Time after the last request in which slots come back."""


def say(text: str) -> None:
    """Report progress."""
    print(text, file=sys.stderr, flush=True)


class Soak:
    """The engines, what is below them, their users, and the results so far."""

    def __init__(self, folder: Path, undo: ExitStack, seed: int, *, kills: bool = False) -> None:
        self.seed, self.random = seed, Random(seed)
        self._folder, self._undo = folder, undo
        self._model = model = make(folder)
        say("starting far ends")
        self.stage = Stage(folder, undo, alone=kills)
        say("starting three vLLM")
        self._stacks = {name: self.stage.stack(name) for name in ENGINES}
        stacks = {"alone": None, **self._stacks}
        servers: dict[str, SoakServer] = {}
        for name, stack in stacks.items():
            servers[name] = server(folder, name, model, stack)
            undo.callback(servers[name].kill)
            servers[name].ready()
        self.alone = servers.pop("alone")
        self.engines = servers
        self.teller = Teller(self.alone, self.random)
        self.users = Users(servers, self.teller, each=USERS_EACH, seed=seed)
        self.watcher = Watcher(self.stage, ENGINES)
        self.struck: list[Struck] = []
        self.held: list[Held] = []
        self.restarts: list[Restart] = []
        self._served_before = dict.fromkeys(self.stage.levels, 0)
        """Blocks that levels had served to engines that were killed since."""

    def run(self, minutes: float) -> Outcome:
        """Cause one fault after the other, each kind once before any kind again."""
        say("asking vLLM alone for the first answers")
        for _ in range(LAG_MAX):
            self.teller.more()
        with self.watcher, self.users:
            begun_s = time.monotonic()
            until(lambda: all(self._is_warm(name) for name in ENGINES), every_s=0.5)
            say(f"all levels serve after {time.monotonic() - begun_s:.0f} s")
            self.hold()
            for fault in self._faults():
                if time.monotonic() > begun_s + 60 * minutes:
                    break
                time.sleep(BETWEEN_S)
                self.strike(fault)
                if dead := [name for name, one in self.engines.items() if one.process.poll()]:
                    self.users.failed += [(name, time.monotonic(), "it has ended") for name in dead]
                    break
                self.hold()
        took_s = time.monotonic() - begun_s
        last = [self.watcher.samples[name][-1] for name in ENGINES]
        return Outcome(
            minutes=took_s / 60,
            seed=self.seed,
            begun_s=begun_s,
            alone_s=self.teller.took_s,
            asked=self.users.asked,
            wrong=len(self.users.wrong),
            failed=[f"{name}: {error}" for name, _, error in self.users.failed],
            struck=self.struck,
            held=self.held,
            served={
                level: before + sum(one.levels[level][1] for one in last)
                for level, before in self._served_before.items()
            },
            restarts=self.restarts,
        )

    def _is_warm(self, engine: str) -> bool:
        samples = self.watcher.samples[engine]
        return bool(samples) and all(hits > 0 for _, hits in samples[-1].levels.values())

    def _faults(self) -> Iterator[Fault]:
        while True:
            found = self.stage.faults(ENGINES, self.random)
            kills = [self._kill(name) for name in self.random.sample(ENGINES, k=len(ENGINES))]
            found.insert(len(found) // 2, kills.pop())
            yield from [*kills, *found]

    def _kill(self, engine: str) -> Fault:
        """Return the fault that an engine is killed with all of its processes, and starts again.

        Requests to the other engine continue. Those to this one that are in flight may fail.
        """

        def strike() -> float:
            before = int(self.stage.stats(engine)["files"]["blocks"])
            for level, (_, hits) in self.watcher.samples[engine][-1].levels.items():
                self._served_before[level] += hits
            self.users.leave(engine)
            cut, asked, begun_s = self.users.cut, len(self.users.asked), time.monotonic()
            self.engines[engine].kill()
            again = server(self._folder, engine, self._model, self._stacks[engine])
            self._undo.callback(again.kill)
            self.engines[engine] = again
            again.ready()
            took_s = time.monotonic() - begun_s
            recovered = int(self.stage.stats(engine)["files"]["recovered"])
            self.watcher.anew(engine)
            others = sum(one.engine != engine for one in self.users.asked[asked:])
            self.restarts.append(
                Restart(engine, took_s, before, recovered, self.users.cut - cut, others)
            )
            self.users.come_back(engine)
            return time.monotonic()

        return Fault("all", "engine", "SIGKILL, then started again", strike, int, ends=engine)

    def strike(self, fault: Fault) -> None:
        """Cause a fault, repair it, and wait until the level serves all engines."""
        say(f"{fault.level}: {fault.victim} {fault.what}")
        before = [
            self.watcher.none() if name == fault.ends else self.watcher.sample(name)
            for name in ENGINES
        ]
        begun_s = time.monotonic()
        over_s = fault.strike()
        fault.repair()
        levels = list(before[0].levels) if fault.level == "all" else [fault.level]
        times = [
            self.watcher.again_s(level, over_s, GIVEN_UP_S, is_stored=fault.empties)
            for level in levels
        ]
        found = [one for one in times if one is not None]
        again_s = max(found) if len(found) == len(levels) else None
        after = [self.watcher.sample(name) for name in ENGINES]
        both = [*zip(after, before, strict=True)]
        errors = sum(
            now.errors[level] - then.errors[level] for now, then in both for level in levels
        )
        damaged = sum(
            now.damaged[level] - then.damaged[level] for now, then in both for level in levels
        )
        self.struck.append(
            Struck(fault.level, fault.victim, fault.what, begun_s, over_s, again_s, errors, damaged)
        )
        recovery_s = self.struck[-1].recovery_s
        say(
            f"    over after {over_s - begun_s:.1f} s, again after {recovery_s:.1f} s,"
            f" {errors} failed calls, {damaged} damaged blocks; {len(self.users.asked)} requests,"
            f" {len(self.users.wrong)} wrong, {len(self.users.failed)} failed"
        )

    def hold(self) -> None:
        """Count what processes hold while no request is in flight."""
        self.users.pause()
        slots: dict[str, int] = {}

        def are_free() -> bool:
            slots.update({name: self._unowned(name) for name in ENGINES})
            return not any(slots.values())

        try:
            until(are_free, every_s=0.1, within_s=HELD_S)
        except AssertionError:  # the page tells what is still held
            for name in ENGINES:
                say(f"    {name} holds {slots[name]} slots: {self.stage.stats(name)}")
        now_s = time.monotonic()
        for name, engine in self.engines.items():  # later on a level may write a block again
            self.held.append(_held(name, now_s, slots[name], engine.alive()))
        self.held.append(_held("alone", now_s, 0, self.alone.alive()))
        if self.stage.lanes:
            serve = self.stage.serve.server.process.pid
            self.held.append(_held("kvladder serve", now_s, 0, family(serve)))
        self.users.resume()

    def _unowned(self, engine: str) -> int:
        """Return how many slots hold no block of the host level."""
        stats = self.stage.stats(engine)
        arena, blocks = stats["arena"], int(stats["host"]["blocks"])
        return int(arena["slots"]) - int(arena["free"]) - blocks


def _held(who: str, now_s: float, slots: int, processes: Sequence[int]) -> Held:
    descriptors = memory = 0
    for pid in processes:
        with suppress(OSError):  # it has just ended
            descriptors += len([*Path(f"/proc/{pid}/fd").iterdir()])
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            memory += next(int(row.split()[1]) for row in rollup.splitlines() if "Pss:" in row)
    return Held(who, now_s, slots, descriptors, memory << 10)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak, print its page, and return 1 if something happened that must not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no fault after so long")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and of faults")
    parser.add_argument(
        "--kills", action="store_true", help="only kill engines, over files and nothing else"
    )
    parser.add_argument("--out", metavar="FILE", help="write the page to benchmarks/results/FILE")
    parser.add_argument("--report", metavar="FILE", help="draw waits, recoveries and memory")
    arguments = parser.parse_args(argv)
    about = machine()
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        soak = Soak(folder, undo, arguments.seed, kills=arguments.kills)
        outcome = soak.run(arguments.minutes)
    about["command"] = f"python -m benchmarks.soak {' '.join(argv or sys.argv[1:])}"
    load = ", ".join(f"{one:.0f}" for one in os.getloadavg())
    about["load"] = f"{load} in the last 1, 5, 15 minutes, this soak included"
    text = markdown(outcome, about)
    print(text)
    if arguments.out:
        (RESULTS / Path(arguments.out).name).write_text(text)
    if arguments.report:
        write(Path(arguments.report), html(outcome, about))
    return int(bool(outcome.troubles()))


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
