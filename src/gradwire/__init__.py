"""gradwire: gradient compression for PyTorch data-parallel training: less on the wire, the same model at the end.

attachment = gradwire.attach(ddp_model, optimizer, "gcomp")
"""

from gradwire import codecs, schemes
from gradwire.attach import Attachment, attach
from gradwire.errors import (
    BufferTooSmall,
    CorruptMessage,
    GradwireError,
    IncompatibleVersion,
    InvalidArgument,
    PeerLost,
    RankMismatch,
    Unsupported,
)
from gradwire.hook import HookState, ddp_hook
from gradwire.threads import set_thread_count, thread_count

__version__ = "0.1.0"

__all__ = [
    "Attachment",
    "BufferTooSmall",
    "CorruptMessage",
    "GradwireError",
    "HookState",
    "IncompatibleVersion",
    "InvalidArgument",
    "PeerLost",
    "RankMismatch",
    "Unsupported",
    "attach",
    "codecs",
    "ddp_hook",
    "schemes",
    "set_thread_count",
    "thread_count",
]
