"""A checkpoint that does not fit raises a typed error that says why, and changes nothing."""

import copy
import io
from typing import Any

import pytest
import torch

from gradwire import schemes
from gradwire.core.checkpoint import STATE_VERSION
from gradwire.errors import CorruptMessage, IncompatibleVersion, InvalidArgument
from ranks import assert_alike, on_ranks
from small_training import Training


class PerRank(schemes.by_name("zlib").__class__):  # type: ignore[misc]
    """Stands for a scheme with residuals: its state is each rank's own."""

    def __init__(self) -> None:
        super().__init__("zlib", {})
        self.state_is_per_world = True

    def state_dict(self) -> dict[str, Any]:
        return {"residual": torch.ones(3)}


def start(rank: int, scheme: Any) -> Training:
    """After a backward pass."""
    training = Training(rank, scheme, model=lambda: torch.nn.Linear(20, 30), timeout_s=100)
    training.backward(0)
    return training


@on_ranks(2, timeout_s=60)
def test_misfit_checkpoint_raises_its_error_and_changes_nothing(rank: int, world_size: int) -> None:
    training = start(rank, schemes.by_name("gcomp", refresh_every=4))
    attachment = training.attachment
    good = attachment.state_dict()
    file = io.BytesIO()
    torch.save(good, file)
    file.seek(0)
    assert_alike([torch.load(file, weights_only=True), good])
    own, others = good["state"], {**good["configuration"], "refresh_every": 50}
    table = own["tables"]["wide"]
    corrupt = table.clone()
    corrupt[40] ^= 1

    def with_table(wide: torch.Tensor) -> dict[str, Any]:
        return {**good, "state": {**own, "tables": {**own["tables"], "wide": wide}}}

    misfits: list[tuple[Any, type[Exception], str]] = [
        (None, CorruptMessage, "not a gradwire state_dict"),
        ([good], CorruptMessage, "not a gradwire state_dict"),
        ({}, CorruptMessage, "not a gradwire state_dict"),
        ({"model": {}, "state": {}}, CorruptMessage, "lacks 'version'"),
        *[
            ({key: value for key, value in good.items() if key != field}, CorruptMessage, field)
            for field in ("version", "scheme", "configuration", "world_size", "rank", "step", "state")
        ],
        ({**good, "step": "7"}, CorruptMessage, "lacks 'step' \\(int\\)"),
        ({**good, "version": STATE_VERSION + 1}, IncompatibleVersion, f"has version {STATE_VERSION + 1}"),
        ({**good, "scheme": "zlib"}, InvalidArgument, "written by scheme 'zlib', but 'gcomp' is attached"),
        ({**good, "configuration": others}, InvalidArgument, "refresh_every: 50 saved, 4 now"),
        ({**good, "world_size": 5}, InvalidArgument, "written by 5 ranks, this run has 2.*strict=False"),
        ({**good, "state": {}}, InvalidArgument, "not the state of scheme 'gcomp'"),
        ({**good, "state": {**own, "tables": 3}}, InvalidArgument, "not the state of scheme 'gcomp'"),
        ({**good, "state": {**own, "counts": torch.zeros(3)}}, InvalidArgument, "not the state of scheme 'gcomp'"),
        ({**good, "state": {**own, "switch_step": "2"}}, InvalidArgument, "not the state of scheme 'gcomp'"),
        *((with_table(wide), CorruptMessage, "") for wide in (corrupt, table[:50].clone())),
        (with_table(own["tables"]["narrow"]), InvalidArgument, "wrong width under 'wide'"),
    ]
    for misfit, error, words in misfits:
        with pytest.raises(error, match=words or None):
            attachment.load_state_dict(copy.deepcopy(misfit))
        assert_alike([attachment.state_dict(), good])
    attachment.load_state_dict({**good, "world_size": 5}, strict=False)  # tables are the same on all ranks
    attachment.load_state_dict({**good, "rank": 1 - rank})
    attachment.load_state_dict(good)

    training = start(rank, PerRank())
    attachment = training.attachment
    good = attachment.state_dict()
    for strict in (True, False):
        with pytest.raises(InvalidArgument, match=r"state_dict\(all_ranks=True\)"):
            attachment.load_state_dict({**good, "world_size": 5}, strict=strict)
    with pytest.raises(InvalidArgument, match="load each rank's own file"):
        attachment.load_state_dict({**good, "rank": 1 - rank})
