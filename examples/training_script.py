"""A complete training script: mixed precision, clipping, EMA, schedule, resume, early stopping, many workers.

pip install ".[fast]" scikit-learn
python examples/training_script.py                              # one process
torchrun --nproc-per-node=2 examples/training_script.py         # two
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from spingrad import QPSBGD, BinaryLinear, binary_parameters, real_parameters
from spingrad.checkpoint import Checkpoint

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument(
    "--patience", type=int, default=10, help="epochs without a better accuracy before it stops"
)
parser.add_argument("--folder", default="digits", help="of the checkpoints, from which the run continues")
args = parser.parse_args()

rank, workers = 0, 1
if "RANK" in os.environ:  # started by torchrun
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 8 - 1, torch.tensor(labels)
order = torch.randperm(len(x))
train, held_out = order[:1500], order[1500:]

model = nn.Sequential(
    BinaryLinear(64, 256),
    nn.BatchNorm1d(256),
    nn.Hardtanh(),
    BinaryLinear(256, 256),
    nn.BatchNorm1d(256),
    nn.Hardtanh(),
    nn.Linear(256, 10),
)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98), use_buffers=True)
real = [p for _, p in real_parameters(model)]
adam = torch.optim.AdamW(real, lr=3e-3)
binary = QPSBGD(binary_parameters(model), lr=3e-3)
trained = nn.parallel.DistributedDataParallel(model) if workers > 1 else model
optimizers = [adam, binary]
steps = args.epochs * -(-len(train) // 100)
schedules = [CosineAnnealingLR(optimizer, steps) for optimizer in optimizers]  # the last steps are small ones
scaler = torch.amp.GradScaler("cpu", enabled=False)  # with float16 on a GPU: "cuda", enabled=True


class Progress:
    """The best accuracy so far, and the epochs since then."""

    best, since = 0.0, 0

    def note(self, accuracy: float) -> None:
        self.since = 0 if accuracy > self.best else self.since + 1
        self.best = max(self.best, accuracy)

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best, "since": self.since}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.best, self.since = state["best"], int(state["since"])


progress = Progress()
checkpoint = Checkpoint(
    args.folder,
    model=model,
    ema=ema,
    adam=adam,
    binary=binary,
    adam_schedule=schedules[0],
    binary_schedule=schedules[1],
    scaler=scaler,
    progress=progress,
)

for epoch in range(checkpoint.load(), args.epochs):  # 0, or where the last run stopped
    shuffled = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))]
    for rows in shuffled.split(100):
        own = rows.tensor_split(workers)[rank]
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(trained(x[own]), y[own])
        scaler.scale(loss).backward()
        scaler.unscale_(adam)
        nn.utils.clip_grad_norm_(real, 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            scaler.step(optimizer)
            schedule.step()
        scaler.update()
        ema.update_parameters(model)

    ema.eval()
    with torch.inference_mode():
        score = (ema(x[held_out]).argmax(1) == y[held_out]).float().mean()
    if workers > 1:
        dist.broadcast(score, 0)  # BatchNorm's statistics differ a little: all workers decide alike
    progress.note(score.item())
    if rank == 0:
        print(f"epoch {epoch + 1}: held-out accuracy {score:.4f}, best {progress.best:.4f}", flush=True)
    checkpoint.save(epoch + 1)
    if progress.since >= args.patience:
        break

if workers > 1:
    dist.destroy_process_group()
