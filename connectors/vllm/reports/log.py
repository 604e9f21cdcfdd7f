"""Writes the cache's log, kept short, through vLLM's handlers.

Only loggers below ``vllm`` have vLLM's handlers, which add process, time and place. The cache logs
as ``kvladder``, since it does not know its engine.
"""

from __future__ import annotations

import logging
from typing import Any

from kvladder.config.stack import StackConfig
from kvladder.manager import CacheManager

logger = logging.getLogger("vllm.kvladder")

TESTED = ((0, 32), (0, 33))
"""Versions of vLLM, major and minor, that tests ran with; docs/how-to/vllm.md lists them, too."""


class _ToVLLM(logging.Handler):
    """Passes the cache's log records on, as if vLLM's own logger had been called."""

    def emit(self, record: logging.LogRecord) -> None:
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


def route() -> None:
    """Send the cache's log to vLLM's handlers, unless it has handlers. May be called again."""
    cache = logging.getLogger("kvladder")
    if cache.handlers:
        return
    cache.addHandler(_ToVLLM())
    cache.propagate = False  # else the root logger would print each record a second time
    if cache.level == logging.NOTSET:
        cache.setLevel(logger.getEffectiveLevel())


def say_ready(manager: CacheManager, config: StackConfig) -> None:
    """Log a summary of the opened cache in at most ten lines, and all settings at debug level."""
    logger.info("kvladder is ready: %s", "\n".join(config.summary(manager.layout)))
    logger.debug("kvladder's settings\n%s", manager.describe())


def warn(config: StackConfig, *, version: str, vllm_config: Any = None) -> None:
    """Log a warning for each setting that vLLM allows but that is probably a mistake.

    The cache's start logs its own warnings. ``vllm_config`` is None if vLLM does not hand it over;
    then only the version is checked.
    """
    found = [untested(version)]
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    policy = getattr(transfer, "kv_load_failure_policy", "recompute")
    if policy != "recompute":
        found.append(
            f"kv_load_failure_policy is {policy!r}: a block that cannot be copied fails its"
            ' request. Set it to "recompute" in --kv-transfer-config to recompute the block.'
        )
    if getattr(vllm_config, "shutdown_timeout", None) == 0:
        found.append(lost_at_shutdown(config))
    observes = getattr(vllm_config, "observability_config", None)
    if config.otel.enabled and getattr(observes, "otlp_traces_endpoint", "") is None:
        found.append(
            "otel: vLLM drops the traceparent of requests without --otlp-traces-endpoint:"
            " each request begins a trace of its own"
        )
    for text in filter(None, found):
        logger.warning("%s", text)


def untested(version: str) -> str:
    """Return a warning if the tests were not run with this version of vLLM, else empty text."""
    try:
        minor = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:  # vLLM was built from a checkout without tags
        minor = ()
    if minor in TESTED:
        return ""
    known = " and ".join(f"{major}.{minor}" for major, minor in TESTED)
    return (
        f"this version of kvladder was tested with vLLM {known}, but not with vLLM {version}:"
        " blocks that it serves from the cache may be wrong"
    )


def lost_at_shutdown(config: StackConfig) -> str:
    """Return a warning for vLLM ending the engine at once; empty text if that loses nothing."""
    late = late_levels(config)
    if not late:
        return ""
    return (
        "--shutdown-timeout is 0: at SIGTERM or Ctrl-C vLLM ends the engine at once, and blocks"
        f" that {config.host.name} has not passed on to {' and '.join(late)} yet are lost. Use"
        " --shutdown-timeout 30, or when: commit for that tier."
    )


def late_levels(config: StackConfig) -> list[str]:
    """Return the levels that outlive the engine and get blocks late; it may end before they do.

    Blocks for a level with ``when: evict`` wait in host memory. They are lost with the engine,
    unless another level that outlives it takes them as soon as they are complete.
    """
    lasting = [level for level in config.levels if level.outlives]
    at_once = [level.rule for level in lasting if level.when == "commit"]
    return [
        level.name
        for level in lasting
        if level.when == "evict"
        and not any(
            rule.min_priority <= level.min_priority and rule.min_hits <= level.min_hits
            for rule in at_once
        )
    ]
