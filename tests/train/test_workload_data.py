"""Workloads give the same numbers for the same seed and step, and read the user's own folders safely."""

import itertools
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from gradwire.errors import CorruptMessage, InvalidArgument
from gradwire_lab import workloads
from gradwire_lab.workloads import by_name
from gradwire_lab.workloads.base import draw_from_epochs
from small_training import flat

QUICK = ["gpt", "bert", "resnet", "vgg", "lstm", "ncf", "resnet50", "bert-base", "gpt2"]

# Published or, for our own models, counted once by hand.
PARAMETER_COUNTS = {
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "gpt2": 124_439_808,
    "bert-base": 108_893_186,  # BertForQuestionAnswering: no pooler
    "bert-large": 334_094_338,
    "gpt": 1_396_416,
    "resnet": 1_228_394,
    # The GPT's, and the token that masks, for 32 positions instead of 64.
    "bert": 1_396_416 + 192 - 32 * 192,
    # 3x3 convolutions 1-32-32-64-64, dense layers 256-768-768-10, each with biases.
    "vgg": 9 * (32 + 32 * 32 + 32 * 64 + 64 * 64) + 2 * 32 + 2 * 64 + 256 * 768 + 768 * 768 + 768 * 10 + 2 * 768 + 10,
}


@pytest.mark.parametrize("name", sorted(PARAMETER_COUNTS))
def test_models_have_the_published_parameter_counts(name: str) -> None:
    with torch.device("meta"):
        model = by_name(name).make_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETER_COUNTS[name]


def test_lstm_reaches_the_published_shape_by_options() -> None:
    with torch.device("meta"):
        model = by_name("lstm", vocabulary_size=793_470, width=512, hidden=2048, n_layers=2).make_model()
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == 425  # the paper: 426 million


@pytest.mark.parametrize("name", QUICK)
def test_batches_resume_at_any_step_and_differ_by_rank_and_seed(name: str) -> None:
    workload = by_name(name)
    from_start = list(itertools.islice(workload.batches(1, 2, 3, seed=5), 5))
    resumed = list(itertools.islice(by_name(name).batches(1, 2, 3, seed=5, start_step=3), 2))
    for (x, y), (x_again, y_again) in zip(from_start[3:], resumed, strict=True):
        assert torch.equal(x, x_again)
        assert torch.equal(y, y_again)
    assert not torch.equal(from_start[3][0], from_start[4][0])
    for rank, seed in ((0, 5), (1, 6)):
        assert not torch.equal(from_start[0][0], next(workload.batches(rank, 2, 3, seed=seed))[0])


@pytest.mark.parametrize("name", ["gpt", "bert", "resnet", "vgg", "lstm"])
def test_ranks_share_the_batch_that_one_rank_would_take(name: str) -> None:
    workload = by_name(name)
    whole = workload.batch_at(7, 0, 1, 8, seed=0)[0]
    parts = [workload.batch_at(7, rank, 4, 2, seed=0)[0] for rank in range(4)]
    assert torch.equal(whole, torch.cat(parts))


def test_masked_bytes_are_the_targets_and_the_others_are_there() -> None:
    workload, causal = by_name("bert", length=64), by_name("gpt")
    masked, targets = workload.batch_at(3, 1, 2, 16, seed=4)
    crops, _ = causal.batch_at(3, 1, 2, 16, seed=4)
    hidden = masked == 256
    assert torch.equal(masked[~hidden], crops[~hidden])
    assert torch.equal(targets[hidden], crops[hidden])
    assert targets[~hidden].eq(-100).all()
    assert hidden.any(1).all()
    assert 0.1 < hidden.double().mean() < 0.2


def test_every_epoch_holds_every_sample_once() -> None:
    drawn = torch.cat([draw_from_epochs(10, step, rank, 2, 3, seed=1) for step in range(5) for rank in range(2)])
    assert drawn.numel() == 30
    for epoch in range(3):
        assert sorted(drawn[10 * epoch : 10 * epoch + 10].tolist()) == list(range(10))


def test_folds_partition_the_digits() -> None:
    parts = [by_name("resnet", folds=4, fold=fold)._split for fold in range(4)]
    held_out = torch.cat([part[1] for part in parts])
    assert sorted(held_out.tolist()) == list(range(1797))
    for training, out in parts:
        assert not set(training.tolist()) & set(out.tolist())


@pytest.mark.parametrize(
    ("name", "options"),
    [("gpt", {"n_layers": 1, "width": 48}), ("bert", {"n_layers": 1, "width": 48}), ("resnet", {"width": 8}),
     ("vgg", {"width": 8, "dense": 64}), ("lstm", {"hidden": 256, "vocabulary_size": 500}), ("ncf", {})],
)  # fmt: skip
def test_a_few_steps_lower_the_loss(name: str, options: dict) -> None:
    workload = by_name(name, **options)
    model = workload.build_model(0)
    optimizer = workload.build_optimizer(model)
    losses = []
    batch = next(workload.batches(0, 1))
    for _ in range(10):
        optimizer.zero_grad()
        loss = workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.train()
    figures = workload.evaluate(model)
    assert model.training
    assert bool(figures) == (workload.data == "real")
    assert all(np.isfinite(list(figures.values())))


@pytest.mark.parametrize("name", ["lstm", "ncf"])
def test_embedding_gradients_are_dense_with_mostly_zero_rows(name: str) -> None:
    workload = by_name(name)
    model = workload.build_model(0)
    workload.loss(model, next(workload.batches(0, 1))).backward()
    gradient = dict(model.named_parameters())["embedding.weight" if name == "lstm" else "user.weight"].grad
    assert gradient.layout == torch.strided
    assert 0 < float((gradient != 0).any(1).float().mean()) < 0.1


def test_weights_depend_on_the_seed_alone() -> None:
    weights = []
    for torchs, seed in ((1, 3), (2, 3), (2, 4)):
        torch.manual_seed(torchs)
        weights.append(flat(by_name("gpt", n_layers=1).build_model(seed)))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_cosine_schedule_warms_up_and_ends_at_zero() -> None:
    workload = by_name("gpt", n_layers=1, schedule="cosine", schedule_steps=10, warmup_steps=2, learning_rate=1.0)
    optimizer = workload.build_optimizer(workload.build_model(0))
    (scheduler,) = workload.build_schedulers([optimizer])
    rates = []
    for _ in range(11):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[0] == 0.5
    assert max(rates) == 1.0 == rates[2]
    assert rates[-1] == 0.0


@pytest.mark.parametrize(
    ("name", "options"),
    [("no-such", {}), ("gpt", {"no_such_option": 1}), ("gpt", {"optimizer": "no-such"}), ("gpt", {"batch_size": 0}),
     ("gpt", {"width": 100, "n_heads": 3}), ("gpt", {"compute": "imagine"}), ("resnet", {"fold": 5, "folds": 5}),
     ("resnet50", {"data_dir": "/no/such/folder", "batch_size": 1}), ("bert-base", {"data_dir": "/no/such/folder"})],
)  # fmt: skip
def test_wrong_names_and_options_raise_invalid_argument(name: str, options: dict) -> None:
    with pytest.raises(InvalidArgument):
        next(workloads.by_name(name, **options).batches(0, 1))


# ---- the user's own folders


def write_cifar(folder: Path, n_images: int = 12) -> None:
    folder.mkdir()
    for index, name in enumerate(["data_batch_1", "data_batch_2", "test_batch"]):
        images = np.random.default_rng(index).integers(0, 256, (n_images, 3072), dtype=np.uint8)
        content = {b"data": images, b"labels": [i % 10 for i in range(n_images)]}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


def test_cifar10_folder_is_read(tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar-10-batches-py")
    workload = by_name("resnet50", data_dir=str(tmp_path), n_classes=10)
    assert workload.data == "real"
    images, labels = next(workload.batches(0, 1, 24))
    assert images.shape == (24, 3, 32, 32)
    assert sorted(labels.tolist()) == sorted([i % 10 for i in range(12)] * 2)


def test_cifar10_pickle_with_code_is_refused(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "harmed",))

    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": Harm(), b"labels": [1]}))
    with pytest.raises(CorruptMessage, match="no place in a CIFAR-10 batch"):
        next(by_name("resnet50", data_dir=str(tmp_path)).batches(0, 1))
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x02]q\x00.", pickle.dumps({b"data": b"", b"labels": []})])
def test_damaged_cifar10_batch_raises_corrupt_message(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(CorruptMessage):
        next(by_name("resnet50", data_dir=str(tmp_path)).batches(0, 1))


def test_image_folder_is_read(tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image", reason="image folders need Pillow")
    for part, label, name in itertools.product(["train", "val"], range(2), ["a.png", "b.jpg"]):
        folder = tmp_path / part / f"class{label}"
        folder.mkdir(parents=True, exist_ok=True)
        image_module.new("RGB", (50, 40), (255 * label, 0, 0)).save(folder / name)
    workload = by_name("resnet50", data_dir=str(tmp_path), image_size=32)
    images, labels = next(workload.batches(0, 1, 4))
    assert images.shape == (4, 3, 32, 32)
    assert torch.equal(images[:, 0].mean((1, 2)) > 0, labels == 1)
    assert workload._images.held_out(4)[1].tolist() == [0, 0, 1, 1]
    (tmp_path / "train" / "class0" / "a.png").write_bytes(b"not an image")
    with pytest.raises(CorruptMessage, match=r"a\.png"):
        next(workload.batches(0, 1, 4))


def test_squad_folder_gives_the_answers_words(tmp_path: Path) -> None:
    context = "The quick brown fox, of whom little is known, jumps over the lazy dog."
    question = {"question": "Who jumps?", "answers": [{"text": "brown fox", "answer_start": context.index("brown")}]}
    content = {"data": [{"paragraphs": [{"context": context, "qas": [question]}]}]}
    for name in ("train-v1.1.json", "dev-v1.1.json"):
        (tmp_path / name).write_text(json.dumps(content))
    workload = by_name("bert-base", data_dir=str(tmp_path), length=16)
    inputs, targets = next(workload.batches(0, 1, 2))
    assert inputs.shape == (2, 2, 16)
    ids, types = inputs[0]
    start, end = targets[0].tolist()
    # [CLS] Who jumps ? [SEP] The quick brown fox: positions 7 and 8.
    assert (start, end) == (7, 8)
    assert ids[0] == 101
    assert ids[4] == 102
    assert types.tolist() == [0] * 5 + [1] * 11
    (tmp_path / "train-v1.1.json").write_text('{"data": [{"paragraphs": 3}]}')
    with pytest.raises(CorruptMessage):
        next(by_name("bert-base", data_dir=str(tmp_path)).batches(0, 1))
