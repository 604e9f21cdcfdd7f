"""Traces of requests in Mooncake's format: read from files, and recorded from a running cache."""

from kvladder.traces.reader import Trace as Trace
from kvladder.traces.reader import TraceRequest as TraceRequest
from kvladder.traces.reader import read_trace as read_trace
from kvladder.traces.recorder import Recorder as Recorder
from kvladder.traces.recording import recorder_of as recorder_of
