"""What an optimizer without a rule does with a gradient, found by probing its `step` on a copy of a few values.

One gain may stand for all values of a parameter only where the step is linear in the gradient, value by value, and alike for
all of them: as SGD's, however it is written. Every other step, and all that cannot be copied, is unknown.
"""

import inspect
import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from gradwire.core.bucket import local_of
from gradwire.schemes.gcomp.terms import Group, State, Terms

_SIDE = 4  # of a square of values where parameters are matrices, so that a step that treats these otherwise shows it
_SIZES = (1e-4, 1e-1, 1e2)  # of gradients: far apart, so that a step that is not linear shows it
_SPREAD = 1.01  # slopes further apart are not one gain; of those that are, the largest counts
_LIFE_STEPS = 300  # without a gradient, in which a momentum lets go of what it holds
_PLAIN = (bool, int, float, str, type(None))


class Probe:
    """A rule (`Terms` of a parameter, its group and state) for one optimizer. Cost: some steps on 16 values, whenever a
    number of the group or of the state is new; hundreds, if a gradient's life is asked for."""

    def __init__(self, optimizer: torch.optim.Optimizer, for_life: bool) -> None:
        self._optimizer, self._for_life = optimizer, for_life
        # What torch's own constructor leaves: groups, state and hooks. Of the rest only numbers and texts are surely copied.
        base = vars(torch.optim.SGD([torch.zeros(1, dtype=torch.float32, device="cpu")], lr=0.1))
        own = [value for name, value in vars(optimizer).items() if name not in base]
        self._can_be_copied = all(isinstance(value, _PLAIN) or inspect.isroutine(value) for value in own)
        self._gains: dict[Any, tuple[float, float] | None] = {}
        group = optimizer.param_groups[0]
        # Whether it has shown a gain of its first parameter.
        self.is_plain = self(group["params"][0], group, optimizer.state.get(group["params"][0], {})) is not None

    def __call__(self, parameter: Tensor, group: Group, state: State) -> Terms | None:
        numbers = [
            (name, float(value) if isinstance(value, Tensor) and value.numel() == 1 else repr(value))
            for name, value in (*group.items(), *sorted(state.items()))
            if name != "params" and not (isinstance(value, Tensor) and value.numel() > 1)
        ]
        key = parameter.dim(), tuple(numbers), len(state)
        if key not in self._gains:
            if len(self._gains) > 100:  # of steps that are past
                self._gains.clear()
            self._gains[key] = self._gain(parameter, group, state)
        gain = self._gains[key]
        return None if gain is None else Terms(a=0.0, b=1 / gain[0], life=gain[1])

    def _gain(self, parameter: Tensor, group: Group, state: State) -> tuple[float, float] | None:
        """The largest slope of a step with respect to the gradient, and a gradient's life in steps; None: unknown."""
        if not self._can_be_copied or parameter.numel() == 0:
            return None
        try:
            smallest, largest = map(float, self._slopes(parameter, group, state, 1).abs().aminmax())
            if not (smallest > 0 and largest <= smallest * _SPREAD and math.isfinite(largest)):
                return None
            in_the_end = self._slopes(parameter, group, state, _LIFE_STEPS).abs().max() if self._for_life else 0.0
        except Exception:  # an optimizer that cannot step on a few values: unknown
            return None
        return largest, max(1.0, float(in_the_end) / largest)

    def _slopes(self, parameter: Tensor, group: Group, state: State, n_steps: int) -> Tensor:
        """(sizes x values,) float64: what a value moves by for each unit of its gradient; 0 where its neighbours count, too."""
        n = local_of(parameter).numel()
        places, slopes = torch.linspace(0, n - 1, min(_SIDE * _SIDE, n), dtype=torch.float64, device="cpu").long(), []
        for size in _SIZES:
            gradient = torch.linspace(-size, 2 * size, len(places), dtype=torch.float64, device="cpu")
            plainly, more, alone = (
                self._stepped(parameter, at, group, state, values, n_steps)
                for at, values in ((places, gradient), (places, gradient + size), (places[:1], gradient[:1]))
            )
            slopes.append((more - plainly) / size if torch.equal(alone, plainly[:1]) else torch.zeros_like(gradient))
        return torch.cat(slopes)

    def _stepped(
        self, parameter: Tensor, places: Tensor, group: Group, state: State, gradient: Tensor, n_steps: int
    ) -> Tensor:
        """The parameter's values at `places`, in float64, after a step with `gradient` and others with none."""
        is_square = parameter.dim() > 1 and len(places) == _SIDE * _SIDE
        shape = ([_SIDE, _SIDE] if is_square else [len(places)]) + [1] * parameter.dim()
        shape = shape[: parameter.dim()]

        def few(value: Any) -> Any:
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                own = local_of(value).detach().reshape(-1)
                return own[places.to(own.device)].to("cpu", torch.float64).reshape(shape)
            if isinstance(value, Tensor) and value.numel() == 1:
                return value.detach().to("cpu", copy=True)
            if isinstance(value, (*_PLAIN, tuple)):
                return value
            raise TypeError("neither a number nor a tensor shaped like the parameter")

        values, twin = torch.nn.Parameter(few(parameter)), object.__new__(type(self._optimizer))
        own_group = {name: few(value) for name, value in group.items() if name != "params"}
        own_state = {values: {name: few(value) for name, value in state.items()}} if state else {}
        twin.__dict__ = {name: {} if name.endswith("_hooks") else one for name, one in vars(self._optimizer).items()}
        twin.__dict__ |= {"param_groups": [{**own_group, "params": [values]}], "state": defaultdict(dict, own_state)}
        step = inspect.unwrap(type(twin).step)
        for number in range(n_steps):
            values.grad = gradient.reshape(shape) * (number == 0)
            with torch.no_grad():
                step(twin)
        return values.detach().reshape(-1)
