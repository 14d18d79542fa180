"""What trains without gradwire: DistributedDataParallel, and PyTorch's hooks that send half of its bytes."""

# No `from __future__ import annotations` here: DDP compares a hook's annotations as objects, not as strings.
from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks


def bf16_hook(group, bucket):  # type: ignore[no-untyped-def]  # annotated, they would have to be DDP's own objects
    """`bf16_compress_hook` under another name: DDP refuses that one off CUDA, though Gloo sums bfloat16 well enough."""
    return default_hooks.bf16_compress_hook(group, bucket)


# By the name that stands for it where a scheme's is expected: its hook, None for DDP's own all-reduce.
HOOKS: dict[str, Callable[..., Any] | None] = {
    "ddp": None,
    "ddp-bf16": bf16_hook,
    "ddp-fp16": default_hooks.fp16_compress_hook,
}


def value_bytes(name: str) -> int:
    """Bytes that a float32 becomes on its way."""
    return 4 if HOOKS[name] is None else 2
