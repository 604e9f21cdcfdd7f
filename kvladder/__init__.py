"""A ladder of places for the KV cache of an LLM engine, below its GPU."""

from kvladder.compose import open_cache as open_cache
from kvladder.errors import ConfigError as ConfigError
from kvladder.errors import KvladderError as KvladderError
from kvladder.keys import BlockKey as BlockKey
from kvladder.keys import KeyScheme as KeyScheme
from kvladder.layout import Layout as Layout
from kvladder.manager import CacheManager as CacheManager
from kvladder.policy.retention import Retention as Retention
from kvladder.policy.retention import RetentionRange as RetentionRange
