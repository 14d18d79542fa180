"""Workloads: a model, its data, its loss and its optimizer under one name, the same on every rank for the same seed."""

from typing import Any

from gradwire import checks
from gradwire.errors import InvalidArgument
from gradwire.registry import Registry, parse_spec
from gradwire_lab.workloads.base import Batch, Workload

__all__ = ["Batch", "Workload", "by_name", "check_name", "names"]

# A new workload is one file and one line here; it is told its name.
_REGISTRY: Registry[Workload] = Registry("workload", {
    "gpt": "gradwire_lab.workloads.gpt:GptWorkload",
    "resnet": "gradwire_lab.workloads.digits:ResNetWorkload",
    "vgg": "gradwire_lab.workloads.digits:VggWorkload",
    "bert": "gradwire_lab.workloads.gpt:SmallBertWorkload",
    "gpt2": "gradwire_lab.workloads.language:Gpt2Workload",
    "bert-base": "gradwire_lab.workloads.language:BertWorkload",
    "bert-large": "gradwire_lab.workloads.language:BertWorkload",
    "resnet50": "gradwire_lab.workloads.vision:VisionWorkload",
    "resnet152": "gradwire_lab.workloads.vision:VisionWorkload",
    "vgg16": "gradwire_lab.workloads.vision:VisionWorkload",
    "vgg19": "gradwire_lab.workloads.vision:VisionWorkload",
    "lstm": "gradwire_lab.workloads.extremes:LstmWorkload",
    "ncf": "gradwire_lab.workloads.extremes:NcfWorkload",
    "many-tensors": "gradwire_lab.workloads.extremes:ManyTensorsWorkload",
    "huge-embedding": "gradwire_lab.workloads.extremes:HugeEmbeddingWorkload",
})  # fmt: skip


def names() -> list[str]:
    """The registered workloads, sorted."""
    return _REGISTRY.names()


def check_name(name: str) -> None:
    """Raises: InvalidArgument."""
    _REGISTRY.class_of(name)


def by_name(name: str, **options: Any) -> Workload:
    """A new workload: NAME or NAME:option=value,..., before which `options` go. Raises: InvalidArgument.
    `compute="emulate"` replays captured gradients of its shape, and takes the options of `ReplayWorkload` too."""
    name, written = parse_spec(name)
    options = {"compute": "real", **written, **options}
    compute = options.pop("compute")
    if compute == "emulate":
        from gradwire_lab.workloads.replay import replay_by_name

        return replay_by_name(name, **options)
    checks.choice("compute", compute, ("real", "emulate"))
    cls = _REGISTRY.class_of(name)
    try:
        return cls(name=name, **options)
    except TypeError as error:
        raise InvalidArgument(f"workload {name!r}: {error}") from error
