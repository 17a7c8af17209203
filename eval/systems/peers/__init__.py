"""Other software that reuses KV, in the same run: asked as its own documentation says, and timed from outside.

They are not dependencies of kvblend. One that is not installed says so when it is first asked to run.
"""

from eval.systems.peers.kvboost import kvboost
from eval.systems.peers.llamacpp import llamacpp

__all__ = ["kvboost", "llamacpp"]
