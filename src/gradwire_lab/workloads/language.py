"""GPT-2, BERT-base and BERT-large, built by transformers from their configuration with random weights."""

import functools
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.errors import InvalidArgument, needs_extra
from gradwire_lab.workloads.base import Batch, Workload, draw_from_epochs, evaluating, step_generator
from gradwire_lab.workloads.squad import Squad, open_squad
from gradwire_lab.workloads.text import byte_tokens, crop_batch, spread_crops


def _make(model: str, config: str, **options: Any) -> nn.Module:
    """A `model` of transformers, of the shape that the `config` with these options says."""
    try:
        import transformers
    except ImportError as error:
        raise needs_extra("this workload needs transformers", "bench") from error
    return getattr(transformers, model)(getattr(transformers, config)(**options))


class Gpt2Workload(Workload):
    """GPT-2 (124 M parameters, output tied to the embedding) on the bytes of Python's standard library.

    Args:
        length: tokens of context (GPT-2: up to 1,024). dropout: 0 keeps replicas reproducible.
    """

    stands_for = "GPT-2, 124 M parameters"
    default_batch_size = 1
    learning_rates: ClassVar[dict[str, float]] = {"adamw": 3e-4, "adam": 3e-4}

    def __init__(self, *, length: int = 64, dropout: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        if not 1 <= length <= 1024:
            raise InvalidArgument(f"length={length}: GPT-2 takes 1 to 1024 tokens")
        self.length, self.dropout = length, dropout

    def make_model(self) -> nn.Module:
        options = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), self.dropout)
        return _make("GPT2LMHeadModel", "GPT2Config", **options, use_cache=False)

    def batch_at(self, step: int, rank: int, world_size: int, batch_size: int, seed: int) -> Batch:
        return crop_batch(byte_tokens()[0], self.length, step, rank, world_size, batch_size, seed)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(input_ids=batch[0]).logits.flatten(0, 1), batch[1].flatten())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Loss in nats per byte over 16 held-out crops."""
        return {"held_out_loss": self.mean_loss(model, spread_crops(byte_tokens()[1], self.length, 16), 4)}


class BertWorkload(Workload):
    """BERT with a question-answering head; `name`: "bert-base" (109 M parameters) or "bert-large" (334 M).

    Args:
        data_dir: a folder with SQuAD v1.1 (train-v1.1.json, dev-v1.1.json); without it tokens are random, shape-only.
        length: tokens of question and paragraph (the papers: 64 to 384). dropout: 0 keeps replicas reproducible.
    """

    learning_rates: ClassVar[dict[str, float]] = {"adamw": 5e-5, "adam": 5e-5}
    _vocabulary_size: ClassVar[int] = 30522

    def __init__(
        self,
        *,
        name: str,
        data_dir: str | None = None,
        length: int = 64,
        dropout: float = 0.0,
        batch_size: int | None = None,
        **options: Any,
    ) -> None:
        usual = {"bert-base": 2, "bert-large": 1}[name]
        super().__init__(name=name, batch_size=usual if batch_size is None else batch_size, **options)
        if not 8 <= length <= 512:
            raise InvalidArgument(f"length={length}: BERT takes 8 to 512 tokens here")
        self.data_dir, self.length, self.dropout = data_dir, length, dropout
        self.data = "shape-only" if data_dir is None else "real"
        self.stands_for = "BERT-large, 334 M parameters: ACP-SGD (batch 8)"
        if name == "bert-base":
            self.stands_for = (
                "BERT-base, 109 M parameters: GComp, ACP-SGD (batch 32), homomorphic compression (SQuAD, batch 8)"
            )

    @functools.cached_property
    def _squad(self) -> tuple[Squad, Squad | None] | None:
        return None if self.data_dir is None else open_squad(self.data_dir, self.length, self._vocabulary_size)

    def make_model(self) -> nn.Module:
        options = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), self.dropout)
        large = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
        options |= large if self.name == "bert-large" else {}
        return _make("BertForQuestionAnswering", "BertConfig", **options)

    def batch_at(self, step: int, rank: int, world_size: int, batch_size: int, seed: int) -> Batch:
        if self._squad is not None:
            squad = self._squad[0]
            return squad.rows(draw_from_epochs(len(squad.targets), step, rank, world_size, batch_size, seed))
        generator = step_generator(seed, "random tokens", step, rank, world_size)
        ids = torch.randint(1000, self._vocabulary_size, (batch_size, self.length), generator=generator)
        types = (torch.arange(self.length) >= self.length // 4).long().expand(batch_size, -1)
        targets = torch.randint(self.length, (batch_size, 2), generator=generator).sort(1).values
        return torch.stack((ids, types), 1), targets

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._answer(model, batch)[0]

    def _answer(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """The loss, and what the model puts out."""
        (ids, types), (first, last) = batch[0].unbind(1), batch[1].unbind(1)
        out = model(input_ids=ids, token_type_ids=types, attention_mask=(ids != 0).long())
        loss = (F.cross_entropy(out.start_logits, first) + F.cross_entropy(out.end_logits, last)) / 2
        return loss, out

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Loss and share of exactly found spans over 64 held-out questions of SQuAD's development file."""
        if self._squad is None or self._squad[1] is None:
            return {}
        squad = self._squad[1]
        chosen = torch.linspace(0, len(squad.targets) - 1, 64).long().unique()
        loss_sum, n_exact = 0.0, 0
        with evaluating(model) as device:
            for indices in chosen.split(8):
                inputs, targets = (values.to(device) for values in squad.rows(indices))
                loss, out = self._answer(model, (inputs, targets))
                found = torch.stack((out.start_logits.argmax(1), out.end_logits.argmax(1)), 1)
                n_exact += int((found == targets).all(1).sum())
                loss_sum += len(indices) * float(loss)
        return {"held_out_loss": loss_sum / len(chosen), "exact": n_exact / len(chosen)}
