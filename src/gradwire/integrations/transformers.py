"""The HF Trainer: a callback that attaches when training begins, saves and loads with its checkpoints, and closes.

trainer = Trainer(model=model, args=TrainingArguments(..., ddp_backend="gloo"), ...)
trainer.add_callback(GradwireTrainerCallback(trainer))
"""

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

import gradwire
from gradwire.doors.attachment import Attachment
from gradwire.schemes import Scheme

FILE = "gradwire.pt"


class GradwireTrainerCallback(TrainerCallback):
    """Puts a scheme to work on the model that the trainer has wrapped. Without several ranks it does nothing.

    Args:
        trainer: the one that it is added to.
        scheme: a Scheme, or a registry name; the default measures and chooses.
        options: as for `gradwire.attach`.
    """

    def __init__(self, trainer: Any, scheme: Scheme | str = "auto", **options: Any) -> None:
        self.trainer, self.scheme, self.options = trainer, scheme, options
        self.attachment: Attachment | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach, and load what `checkpoint-STEP` of the output folder holds, if training goes on from it."""
        if args.world_size < 2:
            return
        scaler = self.trainer.accelerator.scaler
        self.attachment = gradwire.attach(
            self.trainer.model_wrapped, kwargs["optimizer"], self.scheme, scaler, **self.options
        )
        file = _folder(args, state) / FILE
        if state.global_step and file.exists():
            self.attachment.load_state_dict(torch.load(file, weights_only=True))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """On every rank; rank 0 writes one file for all."""
        if self.attachment is not None:
            gathered = self.attachment.state_dict(all_ranks=True)
            if args.process_index == 0:
                torch.save(gathered, _folder(args, state) / FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close; all ranks are here."""
        if self.attachment is not None:
            self.attachment.close()
            self.attachment = None


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
