"""loc_buf: the backup of the last complete global weights, from which every local step departs (SlimGC, section 3.6)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gradwire.errors import Unsupported


class LocBuf:
    """A copy of the global weights, and the flag that says what the parameters hold.

    `is_local` is the paper's flag: 1 after a local update, when the parameters hold this rank's own weights and the
    global ones lie here; 0 after the global weights were put back. Every read and write asserts it, so that neither can
    be taken for the other. While local weights are in place, nobody else may write to the parameters: their versions
    are noted, and a change is an error instead of a loss.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = tuple(parameters)
        self._backup: list[torch.Tensor] = []
        self._versions: list[int] = []
        self.is_local = False

    @property
    def n_bytes(self) -> int:
        """Memory held by the backup."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._backup)

    def back_up(self) -> None:
        """Copy the global weights, which the parameters hold, to the backup."""
        assert not self.is_local, "the parameters hold local weights"
        if not self._backup:
            self._backup = [torch.empty_like(parameter) for parameter in self._parameters]
        torch._foreach_copy_(self._backup, [parameter.detach() for parameter in self._parameters])

    def note_local(self) -> None:
        """The parameters have been moved by this rank's own gradient."""
        assert not self.is_local, "a local update on top of a local update"
        self.is_local = True
        self._versions = [parameter._version for parameter in self._parameters]

    def put_back(self) -> None:
        """The global weights into the parameters again; where they are there already, nothing."""
        if not self.is_local:
            return
        self.check_untouched()
        torch._foreach_copy_([parameter.detach() for parameter in self._parameters], self._backup)
        self.is_local = False

    def check_untouched(self) -> None:
        """Raises: Unsupported if somebody wrote to the parameters while they hold local weights."""
        if not self.is_local:
            return
        for parameter, version in zip(self._parameters, self._versions, strict=True):
            if parameter._version != version:
                # Without this the error would come up again when what is pending is settled.
                self._versions = [parameter._version for parameter in self._parameters]
                raise Unsupported(
                    f"a parameter of shape {tuple(parameter.shape)} was changed while it held this rank's local weights, "
                    "which the next step throws away: call attachment.flush() first (load_state_dict of the module does "
                    "so by itself), then change it on every rank"
                )
