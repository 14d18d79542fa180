"""Residuals conserve the gradient: to the bit through a bucket rebuild, to rounding through another world size."""

import io
from collections.abc import Callable, Sequence

import pytest
import torch

from float_messages import DTYPES
from gradwire import codecs
from gradwire.core.bucket import Bucket, slot_of, slots_by_name
from gradwire.core.feedback import Feedback, redistribute
from gradwire.errors import InvalidArgument

SIZES = [7, 0, 12, 1, 30]


def parameters() -> list[torch.Tensor]:
    return [torch.zeros(size) for size in SIZES]


def bucket_of(chosen: Sequence[torch.Tensor], make: Callable[[int], torch.Tensor] = torch.zeros) -> Bucket:
    """A bucket of these parameters whose gradients `make` makes, from their sizes."""
    offsets = [sum(p.numel() for p in chosen[:i]) for i in range(len(chosen))]
    return Bucket(torch.cat([make(p.numel()) for p in chosen]), chosen, offsets)


def cut(bucket: Bucket) -> torch.Tensor:
    """Stand-in for a lossy codec: float32 to bfloat16, in place; returns what was left out (exact in float32)."""
    kept = bucket.buffer.bfloat16().float()
    left_out = bucket.buffer - kept
    bucket.buffer.copy_(kept)
    return left_out


def keep(feedback: Feedback, bucket: Bucket, left_out: torch.Tensor, loss_scale: float = 1.0) -> None:
    _, unsent = feedback.pair(bucket)
    torch.div(left_out, loss_scale, out=unsent)
    feedback.stage_bucket(bucket, unsent)
    feedback.commit()


def with_residual(feedback: Feedback, bucket: Bucket, loss_scale: float = 1.0) -> torch.Tensor:
    return bucket.buffer.add_(feedback.pair(bucket)[0], alpha=loss_scale)


def test_rebuilt_buckets_get_the_bits_that_the_old_ones_left_out() -> None:
    torch.manual_seed(0)
    model, feedback = parameters(), Feedback()
    bucket = bucket_of(model, torch.randn)
    gradients = bucket.buffer.clone().split(SIZES)
    keep(feedback, bucket, cut(bucket))
    sent = bucket.buffer.split(SIZES)
    for chosen in ([4, 1, 0], [3, 2]):  # DDP's next buckets: another order, and two of them
        kept = with_residual(feedback, bucket_of([model[i] for i in chosen])).split([SIZES[i] for i in chosen])
        for i, left_out in zip(chosen, kept, strict=True):
            assert torch.equal(left_out + sent[i], gradients[i])


def test_what_was_sent_and_what_is_left_add_up_to_what_was_given_over_many_steps() -> None:
    torch.manual_seed(0)
    model, feedback = parameters(), Feedback()
    given, sent = (torch.zeros(sum(SIZES), dtype=torch.float64) for _ in range(2))
    for _ in range(50):
        bucket = bucket_of(model, torch.randn)
        given += bucket.buffer.double()
        with_residual(feedback, bucket)
        left_out = cut(bucket)
        sent += bucket.buffer.double()
        keep(feedback, bucket, left_out)
    rest = with_residual(feedback, bucket_of(model))
    assert torch.allclose(sent + rest.double(), given, rtol=0, atol=1e-5)


def test_discarded_step_changes_nothing() -> None:
    model, feedback = parameters(), Feedback()
    bucket = bucket_of(model, lambda n: torch.full((n,), 0.1))
    keep(feedback, bucket, cut(bucket))
    before = with_residual(feedback, bucket_of(model))
    _, unsent = feedback.pair(bucket)
    feedback.stage_bucket(bucket, unsent.fill_(float("nan")))
    feedback.discard()
    feedback.commit()
    assert torch.equal(with_residual(feedback, bucket_of(model)), before)


def test_residual_is_free_of_the_loss_scale() -> None:
    model, feedback = parameters(), Feedback()
    keep(feedback, bucket_of(model), torch.full((sum(SIZES),), 8.0), loss_scale=8.0)
    assert with_residual(feedback, bucket_of(model), loss_scale=4.0).eq(4.0).all()


def test_two_tensors_a_parameter_change_places_and_none_is_made_once_warm() -> None:
    model, feedback = parameters(), Feedback()
    bucket, places = bucket_of(model, torch.ones), []
    for _ in range(6):
        keep(feedback, bucket, bucket.buffer)
        places.append(feedback._whole[bucket.layout].data_ptr())
    assert len(set(places[2:])) == 2
    assert places[2:4] == places[4:6]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("old_world", [1, 2, 3, 4])
def test_redistribution_keeps_the_mean(dtype: torch.dtype, old_world: int) -> None:
    torch.manual_seed(0)
    states = [{"a": torch.randn(50).to(dtype), "b": torch.randn(3).to(dtype)} for _ in range(old_world)]
    if old_world > 1:
        del states[0]["b"]  # a rank that has left nothing out for it yet
    new = redistribute(states)
    unit = torch.finfo(dtype).eps
    for name in ("a", "b"):
        mean = sum(state[name].double() for state in states if name in state) / old_world
        assert new[name].dtype == dtype
        assert torch.allclose(new[name].double(), torch.as_tensor(mean), rtol=unit, atol=unit)  # the same on every rank


def test_state_comes_back_by_name_and_misfits_are_refused() -> None:
    model, feedback, other = parameters(), Feedback(), Feedback()
    slots = slots_by_name({f"layer.{i}": parameter for i, parameter in enumerate(model)})
    bucket, file = bucket_of(model, torch.randn), io.BytesIO()
    keep(feedback, bucket, bucket.buffer)
    torch.save(feedback.state_by_name(slots), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other.load_by_name(state, slots)
    assert torch.equal(with_residual(other, bucket_of(model)), bucket.buffer)
    for misfit in ({"layer.9": torch.zeros(3)}, {"layer.0": torch.zeros(3)}):
        with pytest.raises(InvalidArgument, match="Load the checkpoint into the model that wrote it"):
            other.load_by_name(misfit, slots)
    for no_floats in ([1.0], torch.zeros(3, dtype=torch.int64)):
        with pytest.raises(InvalidArgument, match="no tensor of floats"):
            other.load_by_name({"layer.0": no_floats}, slots)  # type: ignore[dict-item]
    assert other.state_by_name(slots).keys() == state.keys()  # what it held is still there


def test_buckets_that_are_laid_out_alike_keep_residuals_of_their_own() -> None:
    feedback, buckets = Feedback(), [bucket_of(parameters(), torch.ones) for _ in range(2)]
    assert buckets[0].layout_hash == buckets[1].layout_hash
    for step in range(4):
        for number, bucket in enumerate(buckets):
            residual, unsent = feedback.pair(bucket)
            assert bool((residual == (10 * number + step - 1 if step else 0)).all())
            unsent.fill_(10 * number + step)
            feedback.stage_bucket(bucket, unsent)
        feedback.commit()


def test_what_is_staged_for_some_is_committed_for_these_alone_and_none_leaves_nothing() -> None:
    (first, second, *_), feedback = map(slot_of, parameters()), Feedback()
    for value, slot in enumerate((first, second)):
        feedback.stage(slot, feedback.room(slot, slot.numel()).fill_(value + 1)[:])
    feedback.commit([first])
    assert feedback.of(first) is not None
    assert feedback.of(second) is None
    feedback.stage(first, None)
    feedback.commit()
    assert feedback.of(first) is None


def test_codecs_say_whether_their_error_may_be_fed_back() -> None:
    assert {name for name in codecs.names() if not codecs.by_name(name).feeds_back} == {"qsgd", "ternary"}
