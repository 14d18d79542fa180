"""The bare quantiser on the training thread: the mean it takes, and what it keeps; SlimGC's probes count to their step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import schemes
from gradwire.codecs.quantised import OneBit
from gradwire_lab.bench.train_methods import TrainingThreadQuantiser
from ranks import agree, on_ranks
from small_training import Training, sgd


@on_ranks(3)
def test_the_quantiser_on_the_training_thread_conserves_gradients(rank: int, world_size: int) -> None:
    """mean(result) + mean(residual) = mean(gradient + old residual), the same bits on every rank, time told as spans."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(30, 41), nn.Tanh(), nn.Linear(41, 5))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.003)
    occupied: list[float] = []
    quantiser = TrainingThreadQuantiser(OneBit(), occupied.append)
    quantiser.register(ddp)
    parameters = list(model.parameters())
    for step in range(4):
        inputs = torch.randn(8, 30, generator=torch.Generator().manual_seed(10 * step + rank))
        own = torch.autograd.grad((model(inputs) - 1).square().mean(), parameters)
        before = _residual_sum(quantiser)
        ddp.zero_grad()
        (ddp(inputs) - 1).square().mean().backward()
        results = torch.cat([parameter.grad.reshape(-1) for parameter in parameters if parameter.grad is not None])
        assert agree(results)
        if step >= 2:  # DDP has rebuilt its buckets, which residuals belong to
            expected = _total(sum(g.double().sum() for g in own) + before)
            found = world_size * results.double().sum() + _total(_residual_sum(quantiser))
            assert torch.allclose(found, expected, atol=1e-4)
    assert len(occupied) >= 4
    assert all(seconds > 0 for seconds in occupied)
    assert quantiser.sent_bytes > 0
    assert all(end >= start for start, end in quantiser.codec_spans + quantiser.communicate_spans)
    assert len(quantiser.communicate_spans) == 2 * len(occupied)


def _residual_sum(quantiser: TrainingThreadQuantiser) -> torch.Tensor:
    return sum((e.residual.double().sum() for e in quantiser._exchanges.values()), torch.zeros((), dtype=torch.float64))


def _total(value: torch.Tensor) -> torch.Tensor:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total


@on_ranks(3)
def test_probes_count_to_their_step(rank: int, world_size: int) -> None:
    for backup in (False, True):
        scheme = schemes.by_name("slimgc", codec="one-bit", warmup_steps=4, backup=backup)
        training = Training(rank, scheme, sgd, lambda: nn.Linear(20, 60), timeout_s=100)
        recorder, sent = training.attachment.recorder, []
        for step in range(5):
            training.backward(step)
            assert recorder.steps[-1].step == step
            sent.append(recorder.steps[-1].bytes_sent)
            if step in (2, 3):
                assert not recorder.unsummed_buckets(), "the step does not end before its probes"
            training.optimizer.step()
        if not backup:  # with it, the first two steps' traffic goes on while the next one computes
            # Even steps are compressed and odd ones raw; three probes of each small size come on top.
            assert sent[2] > 2 * sent[0] > 0, sent
            assert sent[3] > 2 * sent[1] > 0, sent
            assert sent[4] < 2 * sent[1], sent
