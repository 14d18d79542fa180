"""TensorBoard: the step records as scalars, one run a rank."""

import os
from collections.abc import Sequence
from typing import Any

from gradwire.errors import needs_extra
from gradwire.telemetry.recorder import BucketRecord, StepRecord

__all__ = ["TensorBoardSink"]


class TensorBoardSink:
    """Writes every field of `StepRecord.as_dict` as a scalar: `gradwire/bytes/...`, `gradwire/seconds/...`, ...

    `every` thins the log to every n-th step: an event file grows by about 1 KB a step.

    Raises: Unsupported (TensorBoard is not installed).
    """

    def __init__(self, log_dir: str | os.PathLike[str], every: int = 1) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            what = f"the TensorBoard sink needs the package tensorboard ({error}), JSON lines need none"
            raise needs_extra(what, "tensorboard") from error
        self.path = os.fspath(log_dir)
        self._every = every
        self._writer: Any = SummaryWriter(log_dir=self.path)

    def write_step(self, step_record: StepRecord, bucket_records: Sequence[BucketRecord]) -> None:
        if step_record.step % self._every:
            return
        for name, value in step_record.as_dict().items():
            if name != "step":
                self._writer.add_scalar(_tag(name), value, step_record.step)

    def close(self) -> None:
        self._writer.close()


def _tag(name: str) -> str:
    if name.endswith("_s"):
        return f"gradwire/seconds/{name[:-2]}"
    if name.startswith("n_"):
        return f"gradwire/count/{name[2:]}"
    return f"gradwire/bytes/{name}" if "bytes" in name else f"gradwire/{name}"
