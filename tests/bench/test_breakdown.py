"""The breakdown of a step (ACP-SGD's Figs. 3 and 8): its parts add up, and compression is what the recorder saw."""

import pytest

from gradwire_lab.bench.train import split_steps
from gradwire_lab.bench.train_methods import StepTimes
from ranks import on_ranks
from small_training import Training

# Three steps on each of two ranks; in the second one rank 1 waits for nobody but the network.
TIMES = [
    [StepTimes(0.10, 0.05, 0.01), StepTimes(0.10, 0.09, 0.01), StepTimes(0.20, 0.02, 0.02)],
    [StepTimes(0.12, 0.03, 0.01), StepTimes(0.16, 0.03, 0.01), StepTimes(0.10, 0.12, 0.02)],
]


@on_ranks(2)
def test_computation_exposed_communication_and_waiting_add_up_to_the_step(rank: int, world_size: int) -> None:
    steps = [split_steps([step]) for step in TIMES[rank]]
    for number, parts in enumerate(steps):
        mean = sum(times[number].iteration_s for times in TIMES) / 2
        assert sum(parts.values()) == pytest.approx(mean, abs=1e-12)
    # By hand: the slowest rank waits for the network alone, the other for the slowest first.
    assert steps[0] == pytest.approx({"compute_s": 0.12, "exposed_s": 0.03, "wait_s": 0.01})
    assert steps[1] == pytest.approx({"compute_s": 0.14, "exposed_s": 0.03, "wait_s": 0.03})
    assert steps[2] == pytest.approx({"compute_s": 0.17, "exposed_s": 0.02, "wait_s": 0.05})
    assert split_steps(TIMES[rank]) == pytest.approx({"compute_s": 0.14, "exposed_s": 0.03, "wait_s": 0.03})


@on_ranks(2)
def test_every_step_of_the_recorder_has_its_breakdown(rank: int, world_size: int) -> None:
    for name in ("acp-sgd", "power-sgd", "sign-sgd", "top-k", "gcomp"):
        training = Training(rank, name, timeout_s=60).after(range(6))
        attachment = training.attachment
        attachment.wait_until_idle()
        stats = attachment.stats()
        for record in attachment.recorder.unsummed_buckets():  # what follows the last step is in no step yet
            for kind in ("encode_s", "decode_s"):
                stats[kind] -= record.as_dict()[kind]
        steps = [step.as_dict() for step in attachment.recorder.steps]
        assert len(steps) == 6, name
        for kind in ("encode_s", "decode_s", "exposed_s"):
            assert sum(step[kind] for step in steps) == pytest.approx(stats[kind], rel=1e-6), (name, kind)
        for step in steps[1:]:  # the first one has no step before it to be timed from
            assert min(step["encode_s"], step["decode_s"]) > 0, name
            assert 0 <= step["exposed_s"] <= step["iteration_s"], name
