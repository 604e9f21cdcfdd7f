"""The composition root: builds a running cache from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvladder.arena import Arena, Slot
from kvladder.changing.answers import ChangeAnswers
from kvladder.changing.changer import StackChanger
from kvladder.config.levels import level_definition, named_layout
from kvladder.config.registry import finder
from kvladder.config.settings import LevelConfig
from kvladder.config.stack import StackConfig, load_config
from kvladder.control.answers import CacheAnswers
from kvladder.control.guard import Guard
from kvladder.control.hints import Allowance, HintAnswers
from kvladder.control.ports import BoundPort
from kvladder.control.server import ControlServer
from kvladder.control.sockets import BoundSocket, socket_path
from kvladder.errors import ClosedError, ConfigError, Unavailable, refusal
from kvladder.forgetting.ledger import PurgeLedger
from kvladder.forgetting.purger import Purger
from kvladder.forgetting.receipt import Signer
from kvladder.hints.executor import apply_posted
from kvladder.keys import Namespace
from kvladder.layout import Layout
from kvladder.lock import StackLock
from kvladder.manager import CacheManager
from kvladder.notices import Notices
from kvladder.policy.fetch_cost import FetchCostModel
from kvladder.preflight import warn_at_start
from kvladder.publishing.exposition import exposed
from kvladder.publishing.start import say_start
from kvladder.runtime import Runtime, SystemClock
from kvladder.shadow.live import LiveShadow
from kvladder.shadow.start import begin_shadow, make_shadow
from kvladder.tiers.base import Tier
from kvladder.tiers.codecs.pipeline import PipelineSettings, told_apart
from kvladder.tiers.context import Clock
from kvladder.tiers.fields import told
from kvladder.tiers.ladder.base_level import AccessListener, EventBuffer, Shared
from kvladder.tiers.ladder.records.lineage import Lineage
from kvladder.tiers.ladder.stack import HostSettings, Post, TierStack
from kvladder.tiers.spans import Tracer
from kvladder.traces.files import TraceFiles
from kvladder.traces.recorder import Recorder
from kvladder.traces.recording import RecordingManager, require_place

CLOSE_S = 5.0
"""Time limit for closing what runs on the cache's loop."""

if TYPE_CHECKING:
    from kvladder.export.process import Export
    from kvladder.publishing.device import OnDevice
    from kvladder.publishing.publisher import Publisher


def open_cache(
    source: str | Path | Mapping[str, Any],
    *,
    layout: Layout,
    overrides: Mapping[str, Any] | None = None,
) -> CacheManager:
    """Open the cache that a YAML file or a mapping describes, for blocks of ``layout``.

    ``overrides`` are settings by the engine; they override file and environment. The caller closes
    the cache; it is a context manager.

    Raises
    ------
    ConfigError
        A setting is wrong, or names something unavailable; says where, what and what instead.
    """
    return open_manager(load_config(source, overrides=overrides), layout)


def open_manager(
    config: StackConfig,
    layout: Layout,
    *,
    pools: bool = False,
    instance: int = 0,
    serves: bool = False,
    nodes: Collection[int] = (),
    device: OnDevice | None = None,
) -> CacheManager:
    """Build and open everything that ``config`` asks for; on an error nothing is left open.

    ``pools`` tells whether the caller makes block pools from the section ``gpu``. ``instance``
    numbers the engines with this configuration from 0; the name of the control socket and the port
    of the export depend on it. ``serves`` means that there is no engine: clients write to the
    cache. ``nodes`` are the NUMA nodes of the devices that copy from the arena. ``device`` tells
    what the caller's pools hold, for published events.
    """
    config.check(layout)
    _require_effect(config, pools=pools, serves=serves)
    warn_at_start(config)
    named = named_layout(config, layout)
    space = named.namespace(salt=config.block.salt)
    find = finder(layout, space)
    edges = [PipelineSettings(level.make_codecs(), find) for level in config.levels]
    scratch = [level.scratch_blocks(layout) for level in config.levels]
    slots = config.arena_slots(layout) + sum(scratch)
    none = int(not slots)  # an arena has at least one slot: without any, one is set aside unused
    with config.source.explained(), ExitStack() as undo:
        arena = Arena.create(slots + none, layout.slot_bytes, nodes=nodes)
        arena.set_aside(none)
        undo.callback(arena.close)
        runtime = Runtime()
        undo.callback(runtime.close)
        aside = [arena.set_aside(count) for count in scratch]
        fields = told(named.all_fields, salt=config.block.salt)
        clock = SystemClock()
        shadow = make_shadow(config, layout, clock, post=runtime.post)
        tracer = _tracer(config, layout, clock, undo)
        build = partial(build_stack, post=runtime.post, clock=clock, listener=shadow, tracer=tracer)
        stack = build(config, layout, arena, list(zip(edges, aside, strict=True)), fields)
        runtime.post(stack.lock.be_patient)
        publisher = _publisher(config, layout, stack, device)
        if publisher is not None:
            undo.callback(publisher.close)
        runtime.call(stack.open(layout, space, runtime.threads))
        if publisher is not None:
            publisher.start()
        recorder = _recorder(config, layout, stack, instance)
        undo.pop_all()  # from here on the manager closes them
        make = CacheManager if recorder is None else partial(RecordingManager, recorder)
        manager = make(
            layout=layout,
            namespace=space,
            arena=arena,
            stack=stack,
            portal=runtime,
            fetch_deadline_s=config.fetch.deadline_s,
            kinds=told_apart(layout, chain.from_iterable(pipeline.codecs for pipeline in edges)),
            description=_description(config, layout, stack, space),
            publisher=publisher,
            limits=config.limits.of_requests,
        )
        undo.callback(manager.close)
        if publisher is not None:
            manager.report("events", publisher.counts, publisher.describe)
        _admit(config, layout, manager, stack, runtime, instance, pools=pools, serves=serves)
        undo.pop_all()
    say_start(space, stack.levels, layout.block_bytes)
    return manager


def _description(config: StackConfig, layout: Layout, stack: TierStack, space: Namespace) -> str:
    """Return the resolved configuration as text, and what each tier says of itself."""
    in_effect = "\n".join(_in_effect(stack))
    return f"{config.describe(layout)}\n\n{in_effect}\nnamespace {space.hex()}"


def _admit(
    config: StackConfig,
    layout: Layout,
    manager: CacheManager,
    stack: TierStack,
    runtime: Runtime,
    instance: int,
    *,
    pools: bool,
    serves: bool,
) -> None:
    """Begin what uses the cache beside the engine: purges, shadow, HTTP server, the export."""
    purger = _purger(config, manager, stack, runtime, instance)
    shadow = stack.shared.listener
    if isinstance(shadow, LiveShadow):
        begin_shadow(shadow, config, manager.layout, stack)
        manager.report("shadow", shadow.stats, shadow.describe)
    if (tracer := stack.shared.tracer) is not None:
        manager.admit(tracer)
    if config.control.path is not None or config.http.listen is not None:
        answers = _serve_http(config, manager, stack, runtime, instance, purger)

        def changed(now: StackConfig) -> None:
            manager.description = _description(now, layout, stack, manager.namespace)
            answers.know(levels=_listed(now))

        changer = StackChanger(
            manager,
            stack,
            config,
            layout,
            runtime,
            require=lambda new: _require_effect(new, pools=pools, serves=serves),
            changed=changed,
        )
        changes = ChangeAnswers(manager, stack, runtime, changer)
        changes.join(answers)
        manager.admit(changes)
    if config.export.listen is not None:
        export = _export(config, manager, stack, runtime, instance, serves=serves)
        manager.admit(export)
        manager.report("export", export.counts, export.describe)


def _tracer(config: StackConfig, layout: Layout, clock: Clock, undo: ExitStack) -> Tracer | None:
    """Return the tracer of requests, which ``undo`` closes; None if none is configured."""
    if not config.otel.enabled:
        return None
    try:
        from kvladder import __version__ as version
        from kvladder.otel.tracer import open_tracer
    except ImportError as error:
        hint = "install kvladder[otel]"
        raise ConfigError(f"needs OpenTelemetry: {error}", path="otel", hint=hint) from error
    kinds = {level.name: (level.type, level.make.shared) for level in config.levels}
    tracer = open_tracer(clock, kinds=kinds, block_bytes=layout.block_bytes, version=version)
    undo.callback(tracer.close)
    return tracer


def _listed(config: StackConfig) -> list[dict[str, str]]:
    return [{"name": one.name, "type": one.type} for one in config.tiers]


def _purger(
    config: StackConfig, manager: CacheManager, stack: TierStack, runtime: Runtime, instance: int
) -> Purger | None:
    """Return what keeps receipts of purges, after what earlier processes owe was begun again.

    None if none are configured.
    """
    from kvladder import __version__ as version

    if config.forget.path is None:
        return None
    try:
        say = stack.shared.notices.say
        signer = Signer(config.forget.secrets(say))
        ledger = PurgeLedger(config.forget.of(instance), signer)
    except Unavailable as error:
        raise refusal(error, required=False) from error
    blocks = manager.arena.slots + sum(level.capacity_blocks for level in stack.levels)
    try:
        stack.lineage = Lineage(2 * blocks, ledger.path / "lineage")
    except OSError as error:
        ledger.close()
        what = f"{ledger.path}: {error.strerror}"
        hint = "expected a directory that this user may write to"
        raise ConfigError(what, path="forget.path", hint=hint) from error
    purger = Purger(
        manager,
        stack,
        ledger,
        runtime.threads("purges"),
        types={tier.name: tier.type for tier in config.tiers},
        deployment=config.forget.name,
        version=version,
    )
    manager.admit(ClosedOn(runtime, purger.aclose))
    runtime.call(purger.resume())
    return purger


class ClosedOn:
    """Closes what runs on a cache's loop, before the loop ends."""

    def __init__(self, runtime: Runtime, aclose: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._runtime = runtime
        self._aclose = aclose

    def close(self) -> None:
        """See ``Closing``."""
        with suppress(TimeoutError, ClosedError):
            self._runtime.call(self._aclose(), timeout_s=CLOSE_S)


def _serve_http(
    config: StackConfig,
    manager: CacheManager,
    stack: TierStack,
    runtime: Runtime,
    instance: int,
    purger: Purger | None,
) -> CacheAnswers:
    """Begin to answer at the control socket and at the port, as far as they are configured."""
    from kvladder import __version__ as version

    layout, notices = manager.layout, stack.shared.notices
    facts = {
        "version": version,
        "block_tokens": layout.block_tokens,
        "block_bytes": layout.block_bytes,
        "levels": _listed(config),
    }
    guard = Guard(config.http.secrets(notices.say).lines, config.http.hosts)
    clock = SystemClock()
    hints = HintAnswers(partial(apply_posted, manager), Allowance(clock.now, clock.cpu))
    answers = CacheAnswers(manager, runtime, notices.recent, exposed, facts, clock.now, hints)
    answers.purger = purger
    server = ControlServer(answers, notices.say, answers.bytes_max)
    answers.listens = lambda: server.names
    manager.admit(server)
    manager.report("listeners", server.stats, server.describe)
    server.prepare(stack.lock.be_patient)
    if config.control.path is not None:
        path = socket_path(config.control.path, instance)
        server.listen(lambda: BoundSocket(path), "control socket")
    if config.http.listen is not None:
        address = config.http.of(instance)
        server.listen(lambda: BoundPort(address), "HTTP port", guard)
    return answers


def _require_effect(config: StackConfig, *, pools: bool, serves: bool) -> None:
    """Raise ConfigError if a setting has no effect for the caller that opens the cache."""
    if config.block.size_bytes is not None and not serves:
        hint = "leave it out: the engine sets it; only kvladder serve reads it"
        raise ConfigError("has no effect here", path="block.size", hint=hint)
    if "gpu" in config.source.raw and not pools:
        hint = "leave the section out: the engine has a block pool of its own"
        raise ConfigError("has no effect here", path="gpu", hint=hint)
    if config.record.path is not None and (pools or serves):
        raise unrecorded("a cache server's clients" if serves else "pools on the device")
    if config.otel.enabled and serves:
        hint = "leave it out: clients do not say which request they read for"
        raise ConfigError("has no effect here", path="otel", hint=hint)
    if config.shadow.enabled and (pools or serves):
        raise unrecorded("a cache server's clients" if serves else "pools on the device", "shadow")


def unrecorded(what: str, section: str = "record") -> ConfigError:
    """Return the error for a recording of ``what``, which look up only parts of their prompts."""
    hint = f"leave it out: {what} look up parts of prompts, so requests cannot be told"
    return ConfigError("has no effect here", path=section, hint=hint)


def _recorder(
    config: StackConfig, layout: Layout, stack: TierStack, instance: int
) -> Recorder | None:
    """Return the recorder of requests, its thread started; None if none is configured."""
    record = config.record
    if record.path is None:
        return None
    path = require_place(record.of(instance))
    return Recorder(
        TraceFiles(path, size_bytes=record.size_bytes, files=record.files),
        now=stack.shared.clock.now,
        say=stack.shared.notices.say,
        block_tokens=layout.block_tokens,
    )


def _export(
    config: StackConfig,
    manager: CacheManager,
    stack: TierStack,
    runtime: Runtime,
    instance: int,
    *,
    serves: bool,
) -> Export:
    """Return the export, which serves this cache's blocks to others."""
    from kvladder.export.cache import EngineOffers
    from kvladder.export.process import Export
    from kvladder.export.server import ServerOffers

    threads = runtime.threads("export")
    offers = (
        ServerOffers(manager, threads)
        if serves
        else EngineOffers(manager, threads, stack.private_levels)
    )
    return Export(
        offers,
        runtime,
        config.export.of(instance),
        stack.shared.notices.say,
    )


def _in_effect(stack: TierStack) -> Iterator[str]:
    """Yield what each level's tier says of itself, now that it is open, and where spans go."""
    for level in stack.levels:
        told = ", ".join(f"{name} {value}" for name, value in level.client.describe().items())
        state = "not open at start" if level.client.absent else told or "open"
        yield f"{level.name}: {state}"
    if stack.shared.tracer is not None:
        yield f"otel: {stack.shared.tracer.where}"


def _publisher(
    config: StackConfig, layout: Layout, stack: TierStack, device: OnDevice | None
) -> Publisher | None:
    """Return the publisher of events, its addresses bound; None if none is configured."""
    events = config.events
    if events.publish is None:
        return None
    try:
        from kvladder.publishing.publisher import Publisher
    except ImportError as error:
        hint = "install kvladder[events]"
        raise ConfigError(f"needs pyzmq: {error}", path="events.publish", hint=hint) from error
    return Publisher(events, stack, block_tokens=layout.block_tokens, device=device)


def build_stack(
    config: StackConfig,
    layout: Layout,
    arena: Arena,
    edges: Sequence[tuple[PipelineSettings, Sequence[Slot]]],
    fields: Mapping[str, str],
    *,
    post: Post,
    clock: Clock,
    make_tier: Callable[[LevelConfig], Tier] = LevelConfig.make_tier,
    listener: AccessListener | None = None,
    tracer: Tracer | None = None,
) -> TierStack:
    """Build the stack, not yet opened; ``edges`` has codecs and scratch slots for each level.

    ``make_tier`` returns the tier of each level below host. ``listener`` hears what requests use.
    ``tracer`` begins spans.
    """
    lock = StackLock()
    shared = Shared(
        arena=arena,
        lock=lock,
        clock=clock,
        events=EventBuffer(config.events.max, post=post),
        notices=Notices(clock.now, held=lock.held, post=post),
        fields=fields,
        listener=listener,
        tracer=tracer,
    )
    host = HostSettings(
        name=config.host.name,
        rule=config.host.rule,
        policy=config.host.make_policy(),
        reserve_blocks=config.arena.reserve.of(arena.slots),
        shares=config.shares(config.host, arena.slots, layout.slot_bytes),
    )
    levels = [
        level_definition(config, level, layout, arena.slots, pipeline, scratch, make_tier(level))
        for level, (pipeline, scratch) in zip(config.levels, edges, strict=True)
    ]
    return TierStack(
        host,
        levels,
        shared,
        post=post,
        fetch_blocks_max=max(1, config.fetch.budget.of(arena.slots)),
        worth=FetchCostModel(always=config.fetch.when == "always"),
    )
