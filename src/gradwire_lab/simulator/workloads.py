"""What a simulated worker computes: a model in blocks, each with its size and the time of its two passes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gradwire.errors import InvalidArgument
from gradwire.registry import describe_choices

# The paper's step: 1.5 s, of which forward takes 0.365 (Luo et al., Table 1; times from SCALE-SIM).
_STEP_S, _FORWARD_SHARE = 1.5, 0.365


@dataclass(frozen=True)
class BlockTimes:
    """Layers whose gradient is sent as one; times in seconds at jitter 1."""

    name: str
    n_values: int
    forward_s: float
    backward_s: float

    def __post_init__(self) -> None:
        if self.n_values < 1 or not (0 <= self.forward_s < float("inf") and 0 <= self.backward_s < float("inf")):
            raise InvalidArgument(
                f"block {self.name}: {self.n_values} values, forward {self.forward_s} s, backward {self.backward_s} s: "
                "expected at least 1 value and times of 0 or more"
            )


@dataclass(frozen=True)
class WorkloadTimes:
    """Blocks in the order of the forward pass; `origin`: where the sizes and times come from, for the records."""

    name: str
    blocks: tuple[BlockTimes, ...]
    origin: str

    def __post_init__(self) -> None:
        if not self.blocks or self.step_s <= 0:
            raise InvalidArgument(f"workload {self.name}: expected at least one block and some computation")

    @property
    def n_values(self) -> int:
        return sum(block.n_values for block in self.blocks)

    @property
    def step_s(self) -> float:
        """Forward and backward pass at jitter 1."""
        return sum(block.forward_s + block.backward_s for block in self.blocks)

    def scaled(self, step_s: float) -> "WorkloadTimes":
        """The same model on another machine, where both passes take `step_s`. Raises: InvalidArgument."""
        if not 0 < step_s < float("inf"):
            raise InvalidArgument(f"a step of {step_s} s: expected a time above 0")
        factor = step_s / self.step_s
        blocks = tuple(
            replace(block, forward_s=block.forward_s * factor, backward_s=block.backward_s * factor)
            for block in self.blocks
        )
        return replace(self, blocks=blocks, origin=f"{self.origin}; times scaled to {step_s:.6g} s a step")


def from_moments(
    name: str, pieces: Iterable[tuple[str, int, float, float]], compute_s: float, origin: str
) -> WorkloadTimes:
    """Pieces (name, values, seconds of the step until its gradient is there, seconds of forward pass) of a step.
    Backward passes fill what lies between the moments; the last one's goes on to the end of what the step computes."""
    ordered = sorted(pieces, key=lambda piece: piece[2])
    before_s, blocks = sum(forward_s for *_, forward_s in ordered), list[BlockTimes]()
    for number, (piece, n_values, ready_s, forward_s) in enumerate(ordered, 1):
        end_s = max(before_s, compute_s if number == len(ordered) else ready_s)
        blocks.append(BlockTimes(piece, n_values, forward_s, end_s - before_s))
        before_s = end_s
    return WorkloadTimes(name, tuple(reversed(blocks)), origin)


# Table 1 for four blocks: millions of values, forward %, backward %. The other splittings are section 5.2.6's; where they
# cut through a row of Table 1, sizes are the parameters' own and times follow the multiply-adds: conv5_2 and conv5_3 have
# as many, conv4_1 has 1.35 times those of each of the five after it, fc1000 next to none.
_RESNET50_LAYERS = {
    "conv1-fc1000": (25.6, 100.0, 100.0),
    "conv1-conv3_4": (1.45, 37.7, 46.7),
    "conv1-conv4_1": (3.0, 41.9, 50.5),
    "conv4_1-conv4_3": (3.8, 10.4, 9.5),
    "conv4_2-conv4_6": (5.6, 15.5, 14.2),
    "conv4_4-conv4_6": (3.35, 9.3, 8.5),
    "conv5_1": (6.0, 16.5, 12.9),
    "conv5_1-fc1000": (17.0, 42.6, 35.3),
    "conv5_2": (4.5, 13.05, 11.2),
    "conv5_2-fc1000": (11.0, 26.1, 22.4),
    "conv5_3-fc1000": (6.5, 13.05, 11.2),
}
_RESNET50_BLOCKS = {
    1: ("conv1-fc1000",),
    3: ("conv1-conv4_1", "conv4_2-conv4_6", "conv5_1-fc1000"),
    4: ("conv1-conv4_1", "conv4_2-conv4_6", "conv5_1", "conv5_2-fc1000"),
    5: ("conv1-conv4_1", "conv4_2-conv4_6", "conv5_1", "conv5_2", "conv5_3-fc1000"),
    6: ("conv1-conv3_4", "conv4_1-conv4_3", "conv4_4-conv4_6", "conv5_1", "conv5_2", "conv5_3-fc1000"),
}

# BERT-base: 12 layers of 7.09 million values in groups of three behind the embeddings (23.8 million, computed by look-up)
# and before the pooler and the head (0.6 million). A backward pass takes twice a forward pass.
_BERT_BASE = ((23.8, 0.0), (21.3, 0.25), (21.3, 0.25), (21.3, 0.25), (21.9, 0.25))
_ON_AN_A100 = "step of an A100 (gradwire_lab.workloads.calibration)"


def _resnet50(name: str, n_blocks: int) -> WorkloadTimes:
    blocks = []
    for layers in _RESNET50_BLOCKS[n_blocks]:
        millions, forward, backward = _RESNET50_LAYERS[layers]
        forward_s = _STEP_S * _FORWARD_SHARE * forward / 100
        backward_s = _STEP_S * (1 - _FORWARD_SHARE) * backward / 100
        blocks.append(BlockTimes(layers, round(millions * 1e6), forward_s, backward_s))
    return WorkloadTimes(name, tuple(blocks), "Luo et al. 2025, Table 1 and section 5.2.6")


def names() -> list[str]:
    return [*(f"resnet50-{n}blocks" for n in _RESNET50_BLOCKS), "bert-base", "resnet50"]


def by_name(name: str) -> WorkloadTimes:
    """A workload: `resnet50-4blocks` (and 1, 3, 5, 6), the paper's; `resnet50` and `bert-base` on an A100. Raises:
    InvalidArgument."""
    from gradwire_lab.workloads.calibration import reference_calibration

    if name not in names():
        raise InvalidArgument(f"no simulated workload is called {name!r}; {describe_choices(name, names())}")
    if name.endswith("blocks"):
        return _resnet50(name, int(name.removeprefix("resnet50-").removesuffix("blocks")))
    reference = reference_calibration(name)
    assert reference is not None, f"{name} is in the table of calibrations"
    step_s = reference.step_s
    if name == "resnet50":
        return replace(_resnet50(name, 4).scaled(step_s), origin=f"blocks of Luo et al. 2025, Table 1; {_ON_AN_A100}")
    blocks = [
        BlockTimes(f"group {index}", round(millions * 1e6), step_s * share / 3, step_s * share * 2 / 3)
        for index, (millions, share) in enumerate(_BERT_BASE)
    ]
    return WorkloadTimes(name, tuple(blocks), f"time by layers; {_ON_AN_A100}")
