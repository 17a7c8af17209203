"""Replaying recorded traffic against the prefix path and a store of chunks, with no model: hit rates and look-up times.

What was asked for, and in which order, is all that a trace has to tell; no KV is computed.
"""

from eval.replay.run import ReplayOptions, run_replay
from eval.replay.traces import KNOWN_TRACES, Request, Trace, TraceError, read_trace

__all__ = ["KNOWN_TRACES", "ReplayOptions", "Request", "Trace", "TraceError", "read_trace", "run_replay"]
