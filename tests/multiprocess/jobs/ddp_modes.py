"""What users do with DDP beside the hook: each equals training in one process, or is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import loft_hvd as loft
from loft_hvd.aggregation.reference import reference
from loft_hvd.errors import ArgumentTypeError, MismatchError
from loft_hvd.pipeline.weights import capped_weights
from loft_hvd.transport.local import LocalWorld
from tests.support.training import make_data, make_model, max_difference

SIZES = (5, 1, 2)
# Of 50 the last batch has 2: other sizes than the plan's, one of 3 ranks has none. With 2 passes
# a step it may share its step with a whole batch of the next epoch.
DATA = make_data(50)
NUM_STEPS = 14
Batch = tuple[Tensor, Tensor]


class Branches(torch.nn.Module):
    """Has a second branch for rare samples: many a rank's batch leaves it unused."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.rare = make_model(), make_model()

    def forward(self, x: Tensor) -> Tensor:
        is_rare = x[:, 0] > 1.0
        if not bool(is_rare.any()):
            return self.usual(x)  # type: ignore[no-any-return]
        return torch.where(is_rare[:, None], self.rare(x), self.usual(x))


class Repeated(torch.nn.Module):
    """Computes a layer twice, again in the backward pass: DDP takes that with static_graph=True."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first, self.again = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.last = torch.nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for _ in range(2):
            h = torch.tanh(checkpoint(self.again, h, use_reentrant=True))
        return self.last(h)  # type: ignore[no-any-return]


def batches(balancer: loft.Balancer, *, own_loader: bool) -> Iterator[Batch]:
    """Yield batches of one epoch after another, by our loader or by torch's own."""
    if own_loader:
        sampler = loft.BatchSampler(DATA, balancer, seed=3)
        theirs = torch.utils.data.DataLoader(DATA, batch_sampler=sampler)
    ours = loft.DataLoader(DATA, balancer, seed=3) if not own_loader else None
    for epoch in range(100):
        if ours is None:
            sampler.set_epoch(epoch)
            yield from theirs
        else:
            ours.set_epoch(epoch)
            yield from ours


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def no_sync(model: torch.nn.Module, is_held_back: bool) -> AbstractContextManager[None]:
    """Hold gradients back as torch's documentation does."""
    # torch's modules have no types of their methods: nor below.
    return model.no_sync() if is_held_back else nullcontext()  # type: ignore[operator]


@contextmanager
def by_hand(model: torch.nn.Module, is_held_back: bool) -> Iterator[None]:
    """Hold gradients back by DDP's flag, as nanoGPT and others do: it stays as it was set."""
    model.require_backward_grad_sync = not is_held_back  # type: ignore[assignment]  # DDP's flag
    yield


def train(
    model: torch.nn.Module,
    balancer: loft.Balancer,
    make: Callable[[torch.nn.Module], torch.optim.Optimizer] = sgd,
    *,
    num_passes: int = 1,
    own_loader: bool = False,
    is_ahead: bool = False,
    holds_back: Callable[[torch.nn.Module, bool], AbstractContextManager[None]] = no_sync,
) -> None:
    """Train for some steps; with ``num_passes`` all passes of a step but the last hold back.

    ``is_ahead``: each batch is fetched between forward and backward of the one before it.
    """
    optimizer = make(model)
    source = batches(balancer, own_loader=own_loader)
    following = next(source) if is_ahead else None
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        for at in range(num_passes):
            x, y = following or next(source)
            is_held_back = at + 1 < num_passes
            is_ddp = isinstance(model, DistributedDataParallel)
            with holds_back(model, is_held_back) if is_ddp else nullcontext():
                loss = torch.nn.functional.mse_loss(model(x), y)
                following = next(source) if is_ahead else None
                loss.backward()
        optimizer.step()


def check_equal(
    what: str,
    make: Callable[[], torch.nn.Module],
    options: dict[str, bool],
    make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] = sgd,
    *,
    num_passes: int = 1,
    own_loader: bool = False,
    is_ahead: bool = False,
    holds_back: Callable[[torch.nn.Module, bool], AbstractContextManager[None]] = no_sync,
) -> None:
    sizes = SIZES[: dist.get_world_size()]
    alone = make()
    one = loft.Balancer(sum(sizes), transport=LocalWorld(1).transport(0))
    train(alone, one, num_passes=num_passes)
    balancer = loft.Balancer(sum(sizes), policy=list(sizes))
    model = DistributedDataParallel(make(), bucket_cap_mb=0.0003, **options)  # type: ignore[arg-type]
    model.register_comm_hook(None, loft.ddp_hook(loft.Mean(), balancer))
    train(
        model,
        balancer,
        make_optimizer,
        num_passes=num_passes,
        own_loader=own_loader,
        is_ahead=is_ahead,
        holds_back=holds_back,
    )
    apart = max_difference(alone, model.module)
    assert apart <= 1e-5, f"{what}: {apart:g} from training alone"
    moved = max_difference(make(), alone)
    assert moved > 1e-2, f"{what}: nothing was trained"


def modes(_: int) -> None:
    """Train as DDP's users do; every way ends with the parameters of one process."""
    check_equal("plain", make_model, {})
    check_equal("no_sync", make_model, {}, num_passes=2)
    check_equal("ahead", make_model, {}, is_ahead=True)
    check_equal("no_sync, ahead", make_model, {}, num_passes=2, is_ahead=True)
    check_equal("no_sync, torch's loader", make_model, {}, num_passes=3, own_loader=True)
    check_equal("held back by hand", make_model, {}, num_passes=3, holds_back=by_hand)
    views = {"gradient_as_bucket_view": True}
    check_equal("no_sync, gradients in buckets", make_model, views, num_passes=2)
    unused = {"find_unused_parameters": True}
    check_equal("unused", Branches, unused)
    check_equal("unused, no_sync", Branches, unused, num_passes=2)
    check_equal("static", Repeated, {"static_graph": True})
    check_equal("ZeRO", make_model, {}, sharded_sgd)


def sharded_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)


def counted(loader: loft.DataLoader) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield batches of one epoch after another, and how many of their samples count."""
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        for x, y in loader:
            yield x, y, 0 if loader.is_padding else len(x)


def flat_grad(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]


def gathered(row: Tensor) -> Tensor:
    """Return the row of every rank, [world_size, ...]."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)


def check_bits(values: Tensor) -> None:
    """Raise unless all ranks have the same."""
    rows = gathered(values)
    assert bool((rows == values).all()), "other bits on another rank"


def held_back(world_size: int) -> None:
    """Hold passes back under a robust rule: rows are the sums of passes, weights their samples."""
    rank, sizes = dist.get_rank(), SIZES[:world_size]
    # An epoch's last batch reaches 2 ranks: too few for a larger f.
    rule = loft.TrimmedMean(f=0)
    balancer = loft.Balancer(sum(sizes), policy=list(sizes))
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.0003)
    model.register_comm_hook(None, loft.ddp_hook(rule, balancer))
    twin, optimizer = make_model(), sgd(model)
    source = counted(loft.DataLoader(DATA, balancer, seed=3))
    num_idle = 0
    for _ in range(NUM_STEPS):
        twin.load_state_dict(model.module.state_dict())
        twin.zero_grad()
        optimizer.zero_grad()
        counts = []
        for at in range(2):
            x, y, count = next(source)
            counts.append(count)
            if count:
                torch.nn.functional.mse_loss(twin(x), y).backward()
            with model.no_sync() if at == 0 else nullcontext():
                torch.nn.functional.mse_loss(model(x), y).backward()
        own = torch.zeros(sum(p.numel() for p in twin.parameters()))
        if any(counts):
            own = flat_grad(twin)
            own *= 2 / sum(count > 0 for count in counts)
        num_idle += 0 in counts
        row = torch.cat([own.double(), torch.tensor([float(sum(counts))], dtype=torch.float64)])
        table = gathered(row).numpy()
        weights = capped_weights([int(total) for total in table[:, -1]])
        wanted = torch.from_numpy(reference(table[:, :-1], rule, weights=weights))
        torch.testing.assert_close(flat_grad(model).double(), wanted, rtol=1e-4, atol=1e-6)
        optimizer.step()
    if rank == 1:
        assert num_idle > 0, "no pass without samples was tried"


def averaged(world_size: int) -> None:
    """Send averages over time, of passes held back too, with a loss scale that grows."""
    for rule in (loft.Mean(), loft.TrimmedMean(f=0)):
        for num_passes in (1, 2):
            check_averages(world_size, rule, num_passes)


def check_averages(world_size: int, rule: loft.Rule, num_passes: int) -> None:
    rank, sizes, b = dist.get_rank(), SIZES[:world_size], 0.9
    balancer = loft.Balancer(sum(sizes), policy=list(sizes))
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.0003)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4)
    hook = loft.ddp_hook(rule, balancer, worker_momentum=b, scaler=scaler)
    model.register_comm_hook(None, hook)
    twin, optimizer = make_model(), sgd(model)
    source = counted(loft.DataLoader(DATA, balancer, seed=3))
    numel = sum(p.numel() for p in twin.parameters())
    # Of every rank: s_i <- b s_i + x_i g_i and w_i <- b w_i + x_i; it sends s_i / w_i.
    sums, weights = np.zeros((world_size, numel)), np.zeros(world_size)
    num_idle = 0
    for _ in range(NUM_STEPS):
        twin.load_state_dict(model.module.state_dict())
        optimizer.zero_grad()
        own = torch.zeros(num_passes, numel + 1, dtype=torch.float64)
        for at in range(num_passes):
            x, y, count = next(source)
            num_idle += count == 0
            if count:
                twin.zero_grad()
                torch.nn.functional.mse_loss(twin(x), y).backward()
                own[at, :-1], own[at, -1] = flat_grad(twin), count
            with model.no_sync() if at + 1 < num_passes else nullcontext():
                scaler.scale(torch.nn.functional.mse_loss(model(x), y)).backward()
        every = gathered(own).numpy()  # [world_size, num_passes, numel + 1]
        gradients, counts = every[..., :-1], every[..., -1]
        mine = counts.sum(axis=1)
        if isinstance(rule, loft.Mean):  # of each pass the mean over all its samples
            shares = counts / counts.sum(axis=0)
            added = counts.sum() * (gradients * shares[..., None]).sum(axis=1)
        else:  # as many gradients as those have that had samples in all passes
            num_real = np.maximum((counts > 0).sum(axis=1), 1)
            added = (mine * num_passes / num_real)[:, None] * gradients.sum(axis=1)
        sums, weights = b * sums + added, b * weights + mine
        if isinstance(rule, loft.Mean):
            wanted = sums.sum(axis=0) / weights.sum()
        else:
            whole = [round(512 * each) for each in weights / weights.mean()]
            is_there = [
                x > 0 or 4 * w >= weights.mean() for x, w in zip(mine, weights, strict=True)
            ]
            used = capped_weights([w if p else 0 for w, p in zip(whole, is_there, strict=True)])
            rows = sums / np.maximum(weights, 1)[:, None]
            wanted = reference(rows, rule, weights=used, present=is_there)
        scaler.unscale_(optimizer)
        got = flat_grad(model)
        np.testing.assert_allclose(got.double().numpy(), wanted, rtol=1e-4, atol=1e-6)
        check_bits(got)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() > 256.0
    if rank == 1:
        assert num_idle > 0, "no pass without samples was tried"


def watched(world_size: int) -> None:
    """Let one rank send garbage: the report names it, and a quarantine leaves it out."""
    wrong = world_size - 1
    scale = -20.0 if dist.get_rank() == wrong else 1.0
    model = DistributedDataParallel(make_model())
    assert "no gradient" in loft.ddp_hook(loft.Median()).report().note
    watching = loft.Suspicion(every=1, interval=5, patience=5)
    hook = loft.ddp_hook(
        loft.TrimmedMean(f=1),
        diagnostics=watching,
        quarantine=loft.Quarantine(probation=500),
    )
    model.register_comm_hook(None, hook)
    optimizer = sgd(model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(40):
        optimizer.zero_grad()
        x, y = (part[torch.randint(50, (16,), generator=generator)] for part in DATA.tensors)
        (scale * torch.nn.functional.mse_loss(model(x), y)).backward()
        optimizer.step()
    report = hook.report()
    assert [worker.ranks for worker in report.workers] == [(r,) for r in range(world_size)]
    held = [each.ranks for each in report.workers if each.in_quarantine_until is not None]
    # Of 3 workers f=1 needs all: one is left out only of 4.
    assert held == ([(wrong,)] if world_size > 3 else []), report


def refused(world_size: int) -> None:
    """Refuse by name what has no whole gradients, and options that differ."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Linear(16, 2))
    mesh = dist.init_device_mesh("cpu", (world_size,))  # type: ignore[attr-defined]
    fully_shard(model, mesh=mesh)
    for ask in (
        lambda: loft.ddp_hook(named_parameters=model.named_parameters()),
        lambda: loft.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters()),
    ):
        expect_refusal(
            ask, r"parameter '0.weight' of shape \[16, 6\] comes from FSDP2.*loft\.fsdp_hook"
        )
    zero = sharded_sgd(make_model())
    said = r"DistributedOptimizer: ZeroRedundancyOptimizer .*register_comm_hook\(None, loft\.ddp_"
    expect_refusal(lambda: loft.DistributedOptimizer(zero), said)
    differing = loft.Suspicion(every=1 + dist.get_rank())
    with pytest.raises(MismatchError, match="ddp_hook: option diagnostics differs on ranks"):
        loft.ddp_hook(loft.Mean(), diagnostics=differing)


class Counted(torch.nn.Module):
    """Keeps a buffer, which DDP gives all ranks in each forward pass, and counts these."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.num_passes = make_model(), 0
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.num_passes += 1
        if self.training:
            self.scale *= 1.01
        return self.inner(x) * self.scale  # type: ignore[no-any-return]  # a module's call


def left_out(world_size: int) -> None:
    """Leave rank 1 without samples: it computes nothing, and has the model of the others."""
    sizes, rank = [5, 0, 3][:world_size], dist.get_rank()
    for rule, clips in ((loft.Mean(), True), (loft.Mean(), False), (loft.Median(), False)):
        balancer = loft.Balancer(sum(sizes), policy=sizes, min_batch=0)
        model = DistributedDataParallel(Counted(), bucket_cap_mb=0.0003)
        hook = loft.ddp_hook(rule, balancer)
        model.register_comm_hook(None, hook)
        alone, optimizer = Counted(), sgd(model)
        by_itself = sgd(alone)
        loader = loft.DataLoader(make_data(sum(sizes) * NUM_STEPS), balancer, seed=3)
        one = loft.Balancer(sum(sizes), transport=LocalWorld(1).transport(0))
        whole = loft.DataLoader(make_data(sum(sizes) * NUM_STEPS), one, seed=3)
        for batch, (x, y) in zip(loader, whole, strict=True):
            optimizer.zero_grad()
            by_itself.zero_grad()
            if batch is not None:
                torch.nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
            torch.nn.functional.mse_loss(alone(x), y).backward()
            if clips:
                hook.synchronize()
                for each in (model, alone):
                    torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            optimizer.step()
            by_itself.step()
            check_bits(flat_grad(model))
        check_bits(torch.cat([p.detach().flatten() for p in model.parameters()]))
        if isinstance(rule, loft.Mean):
            apart = max_difference(alone, model.module)
            assert apart <= 1e-5, f"{apart:g} from training alone"
        num_passes = model.module.num_passes
        assert num_passes == (1 if sizes[rank] == 0 else NUM_STEPS), num_passes


def expect_refusal(ask: Callable[[], object], pattern: str) -> None:
    with pytest.raises(ArgumentTypeError, match=pattern):
        ask()


MODES: dict[str, Callable[[int], None]] = {
    "modes": modes,
    "held_back": held_back,
    "left_out": left_out,
    "averaged": averaged,
    "watched": watched,
    "refused": refused,
}
