"""The optimizers of one training: which of them steps a parameter, and what a step does with a gradient."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from gradwire.errors import InvalidArgument, Unsupported

# adam: divides by a moment of the gradient. sgd: linear in it. muon: orthogonalises it. sign: takes its sign, as Lion does.
# What was measured under one says nothing of another; unknown is all that cannot be told.
FAMILIES = ("adam", "sgd", "muon", "sign", "unknown")

_OF_TORCH = {
    **dict.fromkeys(("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop"), "adam"),
    **{"SGD": "sgd", "ASGD": "sgd", "Muon": "muon", "Rprop": "sign", "LBFGS": "unknown"},
}
# States of the moments that a step divides by; state2 is that of optimizers that keep theirs in 8 bits.
_SECOND_MOMENTS = {"exp_avg_sq", "exp_avg_sq_row", "square_avg", "state2"}
_WRAPPED_AS = ("optimizer", "base_optimizer", "optim", "base", "_optimizer")


class Place(NamedTuple):
    optimizer: Optimizer
    group: dict[str, Any]


class Optimizers:
    """One or several optimizers, read live and never changed; false if there is none.

    Iterating gives them in the order given. An object that only hands calls through to an optimizer (Accelerate's, Lightning's)
    stands for the one inside; another wrapper (SAM, Lookahead) stays, as its step is more, and has the family of what it
    wraps.

    `given`: one, a list or tuple of several, an Optimizers, or None.
    """

    def __init__(self, given: Any = None) -> None:
        several = list(given) if isinstance(given, list | tuple | Optimizers) else [] if given is None else [given]
        if not several and isinstance(given, list | tuple):
            raise InvalidArgument("the list of optimizers is empty: give all whose step() you call")
        self._all = list(dict.fromkeys(map(_handed_through, several)))
        self._places: dict[Tensor, Place] = {}
        self._read: list[tuple[int, int, int]] = []  # groups, their lists of parameters and the lengths of these

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __str__(self) -> str:
        return " and ".join(type(optimizer).__name__ for optimizer in self._all) or "no optimizer"

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all, as they are now."""
        return [group for optimizer in self._all for group in optimizer.param_groups]

    def places(self) -> Mapping[Tensor, Place]:
        """Where each parameter is stepped, as the groups are now; without those that two optimizers share."""
        read = [(id(group), id(group["params"]), len(group["params"])) for group in self.param_groups]
        if read != self._read:
            shared = set(self.shared())
            self._places = {
                parameter: Place(optimizer, group)
                for optimizer in self._all
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter not in shared
            }
            self._read = read  # last: another thread may be asking
        return self._places

    def of(self, parameter: Tensor | None) -> Place | None:
        """The optimizer that steps `parameter`, and its group there; None: none that was given does, or two do."""
        return None if parameter is None else self.places().get(parameter)

    def shared(self) -> list[Tensor]:
        """The parameters that two of the optimizers step."""
        counts = Counter(parameter for group in self.param_groups for parameter in group["params"])
        return [parameter for parameter, count in counts.items() if count > 1]

    def family_of(self, parameter: Tensor) -> str:
        """One of FAMILIES: by the optimizer's class, the options of the group and the names in its state. "unknown" for
        a parameter in none, which one may step that nobody has told of, or in two."""
        place = self.of(parameter)
        return "unknown" if place is None else _family(*place, parameter)

    def families(self, parameters: Any = None) -> frozenset[str]:
        """Those of all `parameters` (default: of all that are stepped)."""
        return frozenset(map(self.family_of, self.places() if parameters is None else parameters))


def inside(optimizer: Any) -> Any:
    """The optimizer at the bottom of wrappers; itself if it wraps none."""
    for _ in range(8):  # deeper than any are wrapped, and an end where two hold each other
        held = [vars(optimizer).get(name) for name in _WRAPPED_AS]
        optimizer = next((one for one in held if hasattr(one, "param_groups")), optimizer)
    return optimizer


def _handed_through(given: Any) -> Optimizer:
    """The optimizer itself, or the one in an object that hands calls through to it."""
    is_accelerates = any(cls.__module__.partition(".")[0] == "accelerate" for cls in type(given).__mro__)
    within = inside(given) if hasattr(given, "__dict__") else given
    one = within if is_accelerates or not isinstance(given, Optimizer) else given
    if not isinstance(one, Optimizer):
        raise Unsupported(
            f"attach(ddp, optimizer, scheme) takes a torch.optim.Optimizer second, or a list of them, got "
            f"{type(given).__name__}; pass those whose step() you call"
        )
    return one


def _family(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> str:
    stepping = inside(optimizer)
    classes = type(stepping).__mro__
    names = [cls.__name__.lower() for cls in classes]
    # use_muon is an option of one that steps some of its groups as Adam does.
    if group.get("use_muon", any("muon" in name for name in names)):
        return "muon"
    for cls in classes:
        if cls.__module__.startswith("torch.optim") and cls.__name__ in _OF_TORCH:
            return _OF_TORCH[cls.__name__]
    keys = {*group, *stepping.state.get(parameter, {})}
    if any("precondition" in key or "orthogonal" in key for key in keys) or "ns_steps" in keys:
        return "unknown"  # it divides by, or multiplies with, more than each value's own moment
    epsilon = group.get("eps", 0)
    if keys & _SECOND_MOMENTS or ("betas" in keys and isinstance(epsilon, float) and epsilon > 0):
        return "adam"
    # A momentum alone does not tell: SGD, Muon and Lion all keep one.
    return "sign" if any("lion" in name for name in names) else "unknown"
