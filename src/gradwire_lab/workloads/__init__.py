"""Workloads: a model, its data, its loss and its optimizer under one name, the same on every rank for the same seed."""

import importlib
from typing import Any

from gradwire import checks
from gradwire.errors import InvalidArgument
from gradwire.registry import describe_choices, parse_spec
from gradwire_lab.workloads.base import Batch, Workload

__all__ = ["Batch", "Workload", "by_name", "check_name", "names"]

# name: ("module:class", options that the name stands for). A new workload is one file and one line here.
_REGISTRY: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gradwire_lab.workloads.gpt:GptWorkload", {}),
    "resnet": ("gradwire_lab.workloads.digits:ResNetWorkload", {}),
    "vgg": ("gradwire_lab.workloads.digits:VggWorkload", {}),
    "bert": ("gradwire_lab.workloads.gpt:SmallBertWorkload", {}),
    "gpt2": ("gradwire_lab.workloads.language:Gpt2Workload", {}),
    "bert-base": ("gradwire_lab.workloads.language:BertWorkload", {"size": "base"}),
    "bert-large": ("gradwire_lab.workloads.language:BertWorkload", {"size": "large"}),
    "resnet50": ("gradwire_lab.workloads.vision:VisionWorkload", {"shape": "resnet50"}),
    "resnet152": ("gradwire_lab.workloads.vision:VisionWorkload", {"shape": "resnet152"}),
    "vgg16": ("gradwire_lab.workloads.vision:VisionWorkload", {"shape": "vgg16"}),
    "vgg19": ("gradwire_lab.workloads.vision:VisionWorkload", {"shape": "vgg19"}),
    "lstm": ("gradwire_lab.workloads.extremes:LstmWorkload", {}),
    "ncf": ("gradwire_lab.workloads.extremes:NcfWorkload", {}),
    "many-tensors": ("gradwire_lab.workloads.extremes:ManyTensorsWorkload", {}),
    "huge-embedding": ("gradwire_lab.workloads.extremes:HugeEmbeddingWorkload", {}),
}


def names() -> list[str]:
    """The registered workloads, sorted."""
    return sorted(_REGISTRY)


def check_name(name: str) -> None:
    """Raises: InvalidArgument."""
    if name not in _REGISTRY:
        raise InvalidArgument(f"no workload is called {name!r}; {describe_choices(name, names())}")


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
    check_name(name)
    path, fixed = _REGISTRY[name]
    module_path, class_name = path.split(":")
    cls = getattr(importlib.import_module(module_path), class_name)
    try:
        workload: Workload = cls(name=name, **fixed, **options)
    except TypeError as error:
        raise InvalidArgument(f"workload {name!r}: {error}") from error
    return workload
