"""What gradwire raises. Every message says what happened, what was expected, where, and what to do next.

docs/errors.md lists each error with its causes and cures.
"""


class GradwireError(Exception):
    """Base of all errors that gradwire raises on purpose."""

    names_global_ranks = False  # in its text; else ranks are named by their place in the group


class InvalidArgument(GradwireError, ValueError):
    """An argument or option is out of range, of the wrong type, shape or dtype."""


class Unsupported(GradwireError):
    """The request is understood, but this scheme, optimizer, device or wrapper cannot; the message says what can."""


def needs_extra(what: str, extra: str) -> Unsupported:
    """The error where a package of an extra is missing. `what` needs which."""
    return Unsupported(f"{what}; in gradwire's clone: pip install '.[{extra}]'")


class BufferTooSmall(GradwireError):
    """An output buffer holds fewer bytes or elements than the result needs."""


class CorruptMessage(GradwireError):
    """A message or file fails its checks: truncated, altered, or not gradwire's."""


class IncompatibleVersion(GradwireError):
    """A message or checkpoint was written by a format version that this build does not read."""


class RankMismatch(GradwireError):
    """Ranks disagree on model, scheme, options or step, or one of them failed; the message names ranks and field."""


class OutOfMemory(GradwireError):
    """A device has no memory left, or host memory cannot be pinned; training without gradwire may go on."""


class PeerLost(GradwireError):
    """A peer died, closed its connection or did not answer within `timeout_s`."""
