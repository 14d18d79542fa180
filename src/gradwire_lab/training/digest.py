"""A fingerprint of all parameters, compared over the ranks."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from gradwire.errors import RankMismatch


def hash_parameters(model: nn.Module) -> str:
    """SHA-256 (hex) over name, dtype, shape and bytes of every parameter, in the model's order; the same on any machine."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        # Through bytes, since numpy knows no bfloat16.
        data = parameter.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(data.numpy().data)
    return digest.hexdigest()


def gather_hashes(own: str, device: torch.device) -> list[str]:
    """Every rank's hash, by rank."""
    mine = torch.tensor(list(bytes.fromhex(own)), dtype=torch.uint8, device=device)
    all_hashes = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_hashes, mine)
    return [bytes(values.tolist()).hex() for values in all_hashes]


def check_equal(hashes: list[str], step: int) -> None:
    """Raises: RankMismatch, on every rank alike, when replicas have come apart."""
    different = [rank for rank, value in enumerate(hashes) if value != hashes[0]]
    if different:
        raise RankMismatch(
            f"after step {step} the parameters of rank(s) {different} differ from rank 0's "
            f"({hashes[different[0]][:12]}... against {hashes[0][:12]}...): the replicas have drifted apart"
        )
