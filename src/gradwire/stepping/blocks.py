"""Blocks: the parameters of neighbouring modules, which are stepped and communicated together."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gradwire.checks import count as check_count
from gradwire.errors import InvalidArgument

# Blocks found automatically hold at least so many values on average: smaller ones would be messages that cost more in
# calls than in bytes (1 ms a message among four ranks, 8 Mb at 4 bits a value and 1 Gb/s).
_MIN_AUTOMATIC_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Block:
    """Parameters that are stepped together."""

    index: int  # position in the module tree, 0 first; by and large the order of use
    name: str  # of its first module
    # in the order of the module tree; a tied parameter lies in the first block that has it
    parameters: tuple[torch.Tensor, ...]
    users: tuple[nn.Module, ...]  # the modules whose forward pass needs one of the parameters

    @property
    def n_elements(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)


Division = int | Sequence[Sequence[str]]


def check_division(division: Division) -> Division:
    """`division` if it is a positive number or lists of module names."""
    if isinstance(division, bool) or not isinstance(division, (int, list, tuple)):
        raise InvalidArgument(f"blocks is a number or a list of lists of module names, got {division!r}")
    if isinstance(division, int):
        return check_count("blocks", division, 1, 0xFFFF)
    if not division or not all(
        isinstance(names, (list, tuple)) and names and all(isinstance(name, str) for name in names)
        for names in division
    ):
        raise InvalidArgument(f"blocks must be lists of at least one module name each, got {division!r}")
    return [list(names) for names in division]


def find_blocks(module: nn.Module, parameters: Iterable[torch.Tensor], division: Division) -> list[Block]:
    """The blocks of a model without DDP around it, over `parameters`. `division`: how many blocks of about equal size
    (fewer in a small model), or for each block the names of its modules as in `named_modules`, with all that is inside
    them; what no name covers makes up a block of its own."""
    covered = dict.fromkeys(parameters)
    owners = _owners(module, covered)
    groups = (
        _divide_by_size(owners, division) if isinstance(division, int) else _divide_by_name(module, owners, division)
    )
    users = _users(module, covered)
    blocks: list[Block] = []
    for group in groups:
        members = tuple(parameter for _, own in group for parameter in own)
        needing = tuple(dict.fromkeys(user for parameter in members for user in users[parameter]))
        blocks.append(Block(len(blocks), group[0][0] or type(module).__name__, members, needing))
    return blocks


_Owner = tuple[str, list[torch.Tensor]]  # a module's name, and the parameters that are its own


def _owners(module: nn.Module, covered: dict[torch.Tensor, None]) -> list[_Owner]:
    """Every module that holds parameters, with those that no module before it holds too."""
    seen: set[torch.Tensor] = set()
    owners = []
    for name, inner in module.named_modules():
        own = [p for p in inner.parameters(recurse=False) if p in covered and p not in seen]
        seen.update(own)
        if own:
            owners.append((name, own))
    return owners


def _users(module: nn.Module, covered: dict[torch.Tensor, None]) -> dict[torch.Tensor, list[nn.Module]]:
    users: dict[torch.Tensor, list[nn.Module]] = {parameter: [] for parameter in covered}
    for inner in module.modules():
        for parameter in inner.parameters(recurse=False):
            if parameter in users:
                users[parameter].append(inner)
    return users


def _divide_by_size(owners: list[_Owner], n_blocks: int) -> list[list[_Owner]]:
    sizes = [sum(parameter.numel() for parameter in own) for _, own in owners]
    total = sum(sizes)
    n_blocks = max(1, min(n_blocks, total // _MIN_AUTOMATIC_ELEMENTS))
    groups: list[list[_Owner]] = [[] for _ in range(n_blocks)]
    before = 0
    for owner, size in zip(owners, sizes, strict=True):
        # Where its middle falls: a large module stays whole, in the block that it fills most.
        middle = 2 * before + size
        groups[min(n_blocks - 1, middle * n_blocks // (2 * total)) if total else 0].append(owner)
        before += size
    return [group for group in groups if group]


def _divide_by_name(module: nn.Module, owners: list[_Owner], division: Sequence[Sequence[str]]) -> list[list[_Owner]]:
    known = dict(module.named_modules())
    groups: list[list[_Owner]] = [[] for _ in range(len(division) + 1)]
    home: dict[str, int] = {}
    for index, names in enumerate(division):
        for name in names:
            if name not in known:
                raise InvalidArgument(f"blocks[{index}]: the model has no module {name!r}; see model.named_modules()")
            for inner in (one for one in known if one == name or (name and one.startswith(name + "."))):
                if home.setdefault(inner, index) != index:
                    raise InvalidArgument(f"module {inner!r} lies in blocks {home[inner]} and {index}: name it once")
    for owner in owners:
        groups[home.get(owner[0], len(division))].append(owner)
    return [group for group in groups if group]


class ObservedUse:
    """Learns from one forward pass which modules must not begin theirs before a block is up to date.

    A module may use a parameter of a module inside it without calling that one (MultiheadAttention does): for a user
    that is not called, the nearest module around it that is called has to wait. Until one forward pass was seen there
    is nothing to wait for: no step is pending before the first one.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[Block]) -> None:
        self._module, self._blocks = module, blocks
        self._called: set[nn.Module] = set()
        self._needs: dict[nn.Module, list[Block]] | None = None

    def note_call(self, module: nn.Module) -> None:
        """`module` begins its forward pass, in training."""
        if self._needs is None:
            self._called.add(module)

    def finish(self) -> bool:
        """Called at the start of each forward pass; True the one time that the pass before was the one to learn from."""
        if not self._called or self._needs is not None:
            return False
        inner_of = dict(self._module.named_modules())
        names = {inner: name for name, inner in inner_of.items()}
        self._needs = {}
        for block in self._blocks:
            for user in block.users:
                name = names[user]
                while name and inner_of[name] not in self._called:
                    name = name.rpartition(".")[0]
                waiting = self._needs.setdefault(inner_of[name], [])
                if block not in waiting:
                    waiting.append(block)
        return True

    def blocks_of(self, module: nn.Module) -> Sequence[Block]:
        """The blocks that `module` has to wait for."""
        return () if self._needs is None else self._needs.get(module, ())


def hash_blocks(blocks: Sequence[Block]) -> int:
    """32 bits that differ, but for chance, when the blocks' parameters or their order do."""
    text = repr([[(tuple(p.shape), str(p.dtype)) for p in block.parameters] for block in blocks])
    text += repr([block.name for block in blocks])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
