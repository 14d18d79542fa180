"""gradwire: gradient compression for PyTorch data-parallel training: less on the wire, the same model at the end.

attachment = gradwire.attach(ddp_model, optimizer, "gcomp")
"""

import importlib
from typing import TYPE_CHECKING, Any

# fmt: off
# isort: off
from gradwire.errors import (BufferTooSmall, CorruptMessage, GradwireError, IncompatibleVersion, InvalidArgument,
                             OutOfMemory, PeerLost, RankMismatch, Unsupported)
# isort: on

if TYPE_CHECKING:
    from gradwire import codecs, schemes
    from gradwire.core.threads import set_thread_count, thread_count
    from gradwire.doors.attachment import Attachment, attach
    from gradwire.doors.collectives import all_reduce, register_backend
    from gradwire.doors.elastic import Members
    from gradwire.doors.hook import HookState, ddp_hook
    from gradwire.doors.local_sgd import LocalSgd
    from gradwire.planning.recommend import recommend
    from gradwire.reducer import Reducer
    from gradwire.schemes.gcomp.terms import register_update

__version__ = "0.2.0"

__all__ = [
    "Attachment", "BufferTooSmall", "CorruptMessage", "GradwireError", "HookState", "IncompatibleVersion",
    "InvalidArgument", "LocalSgd", "Members", "OutOfMemory", "PeerLost", "RankMismatch", "Reducer", "Unsupported", "all_reduce",
    "attach", "codecs", "ddp_hook", "recommend", "register_backend", "register_update",
    "schemes", "set_thread_count", "thread_count",
]
# fmt: on

# Loaded at first use, so that `gradwire --help` and the lab's own processes do not wait for torch.
_LAZY = {"Attachment": "doors.attachment", "attach": "doors.attachment"}
_LAZY |= {"all_reduce": "doors.collectives", "register_backend": "doors.collectives"}
_LAZY |= {"HookState": "doors.hook", "ddp_hook": "doors.hook", "Reducer": "reducer", "LocalSgd": "doors.local_sgd"}
_LAZY |= {"Members": "doors.elastic"}
_LAZY |= {"recommend": "planning.recommend", "register_update": "schemes.gcomp.terms"}
_LAZY |= {"set_thread_count": "core.threads", "thread_count": "core.threads", "codecs": "", "schemes": ""}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'gradwire' has no attribute {name!r}")
    module = importlib.import_module(f"gradwire.{_LAZY[name] or name}")
    return getattr(module, name) if _LAZY[name] else module
