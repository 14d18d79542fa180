"""Accelerate: one call after `prepare`, and `save_state` and `load_state` carry the scheme's state of all ranks.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
attachment = gradwire.integrations.accelerate.attach(accelerator, model, optimizer)      # or [muon, adamw]
"""

from typing import Any

import torch

import gradwire
from gradwire.doors.attachment import Attachment
from gradwire.schemes import Scheme


class _Checkpointed:
    """What Accelerate saves: it writes rank 0's answer alone, and gives it to all ranks."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment

    def state_dict(self) -> dict[str, Any]:
        return self._attachment.state_dict(all_ranks=True)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._attachment.load_state_dict(state)


def attach(
    accelerator: Any, model: torch.nn.Module, optimizer: Any, scheme: Scheme | str = "auto", **options: Any
) -> Attachment:
    """`gradwire.attach` on what `accelerator.prepare` returned, saved and loaded with the accelerator's states. Call it
    before `load_state`, and `close()` the attachment at the end. `accumulate` and `no_sync` work as ever. Raises: as
    `gradwire.attach`."""
    attachment = gradwire.attach(model, optimizer, scheme, accelerator.scaler, **options)
    accelerator.register_for_checkpointing(_Checkpointed(attachment))
    return attachment
