"""Trains on MNIST with several workers: each has its own rows of the batch, and all take the same step.

    pip install ".[fast]" ./lab
    torchrun --nproc-per-node=4 examples/distributed_mnist.py                 # under DDP
    torchrun --nproc-per-node=4 examples/distributed_mnist.py --ranks vote    # on a slow network

If a worker dies, torchrun starts all of them again, and they continue from the last checkpoint:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1    # see docs/distributed.md
    torchrun --nproc-per-node=4 --max-restarts=3 examples/distributed_mnist.py --checkpoint run
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn

from spingrad import QPSBGD, BinaryLinear, binary_parameters
from spingrad.checkpoint import Checkpoint
from spingrad_lab.data import mnist

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--ranks", choices=["together", "vote"], default="together")
parser.add_argument("--batch", type=int, default=400, help="of all workers together")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument(
    "--checkpoint", metavar="DIR", help="continue from here, and keep a checkpoint every 50 steps"
)
args = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, workers = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = nn.Sequential(
    BinaryLinear(784, 512), nn.Hardtanh(), BinaryLinear(512, 512), nn.Hardtanh(), BinaryLinear(512, 10)
)
optimizer = QPSBGD(binary_parameters(model), lr=1e-3, ranks=args.ranks)
# Votes need no average of gradients. (With real parameters: spingrad.distributed.data_parallel(model).)
trained = model if args.ranks == "vote" else nn.parallel.DistributedDataParallel(model)
train, test = mnist("train"), mnist("test")
unit = train.pixels().square().mean().sqrt()
x, y = train.pixels() / unit, train.labels
per_epoch = -(-len(x) // args.batch)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * per_epoch)
first = 0
if args.checkpoint:
    checkpoint = Checkpoint(args.checkpoint, model=model, optimizer=optimizer, scheduler=scheduler)
    first = checkpoint.load()

begin = time.perf_counter()
for step in range(first, args.epochs * per_epoch):
    epoch, place = divmod(step, per_epoch)  # the rows of a step follow from its number alone
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
    rows = order[place * args.batch : (place + 1) * args.batch].tensor_split(workers)[rank]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(trained(x[rows]), y[rows])
    loss.backward()
    optimizer.step()
    scheduler.step()
    if args.checkpoint and (step + 1) % 50 == 0:
        checkpoint.save(step + 1)
    if rank == 0 and (step + 1) % 50 == 0:
        rate = (step + 1 - first) / (time.perf_counter() - begin)
        print(f"step {step + 1}: loss {loss:.3f}, {rate:.1f} steps/s", flush=True)

if rank == 0:
    with torch.no_grad():
        accuracy = (model(test.pixels() / unit).argmax(1) == test.labels).float().mean()
    print(f"{args.ranks} on {workers} workers: test accuracy {accuracy:.4f}")
dist.destroy_process_group()
