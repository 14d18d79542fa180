"""The HF Trainer: a callback; its state is in the trainer's own checkpoints.

torchrun --nproc-per-node 2 examples/hf_trainer.py OUTPUT [--steps 8] [--resume]
"""

import argparse
import zlib

import torch
import torch.distributed as dist
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from gradwire.integrations.transformers import GradwireTrainerCallback

parser = argparse.ArgumentParser()
parser.add_argument("--scheme", default="auto")
parser.add_argument("output")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        ids = torch.randint(0, 60, (16,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "attention_mask": torch.ones(16, dtype=torch.long), "labels": ids.sum() % 2}


torch.manual_seed(0)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, num_labels=2,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
)  # fmt: skip
training = TrainingArguments(
    output_dir=args.output, per_device_train_batch_size=4, max_steps=args.steps, save_steps=4, use_cpu=True,
    ddp_backend="gloo", report_to=[], disable_tqdm=True, logging_steps=100, seed=3, lr_scheduler_type="constant",
)  # fmt: skip
trainer = Trainer(model=model, args=training, train_dataset=Data())

trainer.add_callback(GradwireTrainerCallback(trainer, args.scheme))

trainer.train(resume_from_checkpoint=f"{args.output}/checkpoint-4" if args.resume else None)
if dist.get_rank() == 0:
    print(
        f"parameters {zlib.crc32(torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()):08x}"
    )
dist.destroy_process_group()
