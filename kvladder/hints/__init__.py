"""Hints: what a router or an agent asks of the cache before or with a request."""

from kvladder.hints.executor import HintExecutor as HintExecutor
from kvladder.hints.protocol import ActionResult as ActionResult
from kvladder.hints.protocol import HintAction as HintAction
from kvladder.hints.protocol import HintsEnvelope as HintsEnvelope
from kvladder.hints.protocol import Outcome as Outcome
