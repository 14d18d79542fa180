"""Lightning: a callback; its state is in Lightning's own checkpoints.

torchrun --nproc-per-node 2 examples/lightning_fit.py [--epochs 2] [--save FILE] [--load FILE]
"""

import argparse
import os
import zlib

import lightning.pytorch as lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from gradwire.integrations.lightning import GradwireCallback

parser = argparse.ArgumentParser()
parser.add_argument("--scheme", default="auto")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--save")
parser.add_argument("--load")
args = parser.parse_args()


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

    def training_step(self, batch, index):
        (x,) = batch
        return (self.net(x) - x.roll(1, 1)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)

    def on_train_epoch_end(self):
        if args.save and self.current_epoch + 1 == self.trainer.max_epochs:
            self.trainer.save_checkpoint(args.save)


torch.manual_seed(7)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 32)), batch_size=8)
model = Net()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy=DDPStrategy(process_group_backend="gloo"),
    max_epochs=args.epochs,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[GradwireCallback(args.scheme)],
)
trainer.fit(model, data, ckpt_path=args.load, **({"weights_only": False} if args.load else {}))
if trainer.is_global_zero:
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    print(f"parameters {zlib.crc32(flat.numpy().tobytes()):08x}")
