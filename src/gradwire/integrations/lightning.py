"""Lightning: a callback that attaches when training starts, saves and loads with Lightning's checkpoints, and closes.

trainer = Trainer(strategy=DDPStrategy(process_group_backend="gloo"), callbacks=[GradwireCallback()])
"""

from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

import gradwire
from gradwire.doors.attachment import Attachment
from gradwire.schemes import Scheme


class GradwireCallback(Callback):
    """Puts a scheme to work on the strategy's model: DDP, or FSDP2 (ModelParallelStrategy).

    Args:
        scheme: a Scheme, or a registry name; the default measures and chooses, and is for DDP.
        options: as for `gradwire.attach`; `group` may be a function of the trainer, for groups that exist only then.
    """

    def __init__(self, scheme: Scheme | str = "auto", **options: Any) -> None:
        self.scheme, self.options = scheme, options
        self.attachment: Attachment | None = None
        self._loaded: dict[str, Any] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach; all ranks are here."""
        options = dict(self.options)
        if callable(options.get("group")):
            options["group"] = options["group"](trainer)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.attachment = gradwire.attach(trainer.strategy.model, trainer.optimizers, self.scheme, scaler, **options)
        if self._loaded is not None:
            self.attachment.load_state_dict(self._loaded)
            self._loaded = None

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """On every rank; Lightning writes rank 0's."""
        if self.attachment is not None:
            checkpoint["gradwire"] = self.attachment.state_dict(all_ranks=True)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Before there is anything to load into."""
        self._loaded = checkpoint.get("gradwire")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Tell the other ranks what ended the fit, and close: another one may attach again."""
        if self.attachment is not None:
            self.attachment.fail(exception)
        self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close; all ranks are here."""
        if self.attachment is not None:
            self.attachment.close()
            self.attachment = None
