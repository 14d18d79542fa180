"""The schemes `one-bit`, `two-bit` and `qsgd`: a few bits of every value, through the owners of its parts.

Beside an optimizer of Adam's family `one-bit` and `two-bit` begin with plain steps, and a scale serves few values: values far
below their message's scale would drown in its noise.
"""

from typing import Any

from gradwire.codecs.quantised import OneBit, Qsgd, Quantised, TwoBit
from gradwire.core.session import Session
from gradwire.errors import InvalidArgument
from gradwire.exchange.owners import Owners
from gradwire.exchange.parts import QUANTISED_CHUNK_ELEMENTS
from gradwire.schemes.compressed import Compressed
from gradwire.schemes.plain_steps import BESIDE_ADAM, PlainSteps, is_beside_adam
from gradwire.schemes.selection import ByName, Names


class _Quantiser(Compressed):
    """The mean through owners, each value by a quantiser."""

    collective: Owners
    options_of = ByName

    def __init__(
        self,
        codec: Quantised,
        /,
        error_feedback: bool = True,
        pull: str = "compressed",
        chunk_elements: int = QUANTISED_CHUNK_ELEMENTS,
        warmup_steps: int | None = None,
        **names: Names,
    ) -> None:
        self.codec, collective = codec, Owners(codec, pull, chunk_elements)
        plain, select = PlainSteps(self.name, asked=warmup_steps), ByName(**names)
        super().__init__(collective=collective, error_feedback=error_feedback, plain=plain, select=select)

    @property
    def configuration(self) -> dict[str, Any]:
        return {"error_feedback": self.error_feedback, **self.frame_configuration, **self.codec.configuration}

    def bind(self, session: Session) -> None:
        self.codec = self.collective.codec = self._codec_beside(session)
        super().bind(session)

    def _codec_beside(self, session: Session | None) -> Quantised:
        """The quantiser that the session's optimizer chooses; None: as published."""
        return self.codec


class OneBitScheme(_Quantiser):
    """The sign of every value and a scale, with error feedback (Seide et al., Interspeech 2014).

    Args:
        scale, threshold: see `gradwire.codecs.quantised.OneBit`.
        error_feedback: add what messages left out to the next gradient.
        pull, chunk_elements: see `Owners`.
        warmup_steps: the first steps of the training, which are reduced plainly. None: 50 beside all but SGD, else 0.
        scale_values: values to a scale, or "message" for one scale a message. None: 64 beside all but SGD, else
            "message".
        exempt, only: see `ByName`.

    When not to use this: where the network is not the bottleneck, with few steps (what one bit leaves out arrives late), or
    under Adam where its loss has to be plain's: `one-bit-adam` is nearer.
    """

    name = "one-bit"

    def __init__(
        self, scale: str = "mean", threshold: float | None = None, scale_values: int | str | None = None, **options: Any
    ) -> None:
        self._asked = scale, threshold, scale_values
        super().__init__(self._codec_beside(None), **options)

    def _codec_beside(self, session: Session | None) -> OneBit:
        scale, threshold, asked = self._asked
        return OneBit(scale, threshold, _scale_values(self.name, asked, None if scale == "fixed" else session))


class TwoBitScheme(_Quantiser):
    """+t, 0 or -t for every value, with error feedback: the 2-bit quantiser that SlimGC improves.

    Beside Adam, where scales are by group, four levels instead of three: docs/results/lossy.md.

    Args:
        threshold, relative: see `gradwire.codecs.quantised.TwoBit`.
        levels: 3, or 4 (with `scale_values` only, and without a threshold). None: 4 where `scale_values` is left out and
            becomes a number beside Adam, else 3.
        The others: see `OneBitScheme`.

    When not to use this: where the network is not the bottleneck; with an absolute threshold that has not been fitted to the
    gradient's scale, which sends nothing for many steps or noise in all of them.
    """

    name = "two-bit"

    def __init__(
        self,
        threshold: float | None = None,
        relative: bool = True,
        scale_values: int | str | None = None,
        levels: int | None = None,
        **options: Any,
    ) -> None:
        if levels not in (None, 3, 4):
            raise InvalidArgument(f"levels is 3 or 4, not {levels!r}")
        if levels == 4 and not isinstance(scale_values, int):
            raise InvalidArgument("levels=4 is for scales by group: give scale_values=64 too")
        self._levels_in_groups = levels or (4 if scale_values is None and threshold is None else 3)
        self._asked = threshold, relative, scale_values
        super().__init__(self._codec_beside(None), **options)

    def _codec_beside(self, session: Session | None) -> TwoBit:
        threshold, relative, asked = self._asked
        values = _scale_values(self.name, asked, session if relative else None)
        return TwoBit(threshold, relative, values, 3 if values is None else self._levels_in_groups)


class QsgdScheme(_Quantiser):
    """Values rounded by chance to a few levels of their block's norm (Alistarh et al., NeurIPS 2017).

    Right on average, so without error feedback, as published: its errors may be larger than the gradient, and fed back they
    would grow. Sums are rounded a second time on their way back: to 127 levels, so that the mean's error goes on falling with
    the number of ranks.

    Args:
        levels, block, seed: see `gradwire.codecs.quantised.Qsgd`.
        pull, chunk_elements: see `Owners`. "compressed": as few levels back as there, whose error does not average over ranks.
        exempt, only: see `ByName`.

    When not to use this: at 4 bits where one-bit or two-bit with error feedback converges, which send less; with few levels
    and large blocks, whose variance is that of the norm.
    """

    name = "qsgd"
    options_of = ByName  # and none of a quantiser's besides

    def __init__(
        self,
        levels: int = 7,
        block: int = 512,
        seed: int = 0,
        pull: str = "8-bit",
        chunk_elements: int = QUANTISED_CHUNK_ELEMENTS,
        **names: Names,
    ) -> None:
        super().__init__(Qsgd(levels, block, seed), False, pull, chunk_elements, 0, **names)


def _scale_values(scheme: str, asked: int | str | None, session: Session | None) -> Any:
    """Values to a scale, None for one scale a message: as asked, or by the optimizer of `session`."""
    if asked is None:
        return BESIDE_ADAM[scheme]["scale_values"][1] if session is not None and is_beside_adam(session) else None
    return None if asked in ("message", "none") else asked
