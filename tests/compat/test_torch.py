"""Programs for GPUs on a machine without them (--compat torch): what copies, and what is undone.

Documents 001 and 004 are in programs/pytorch.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.launch.harness import Run
from tests.ranks import free_port
from unisono.compat import torch as compat
from unisono.torch_patches import active_patches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible, which is then used")


@pytest.fixture
def installed() -> object:
    compat.install()
    yield
    compat.uninstall()


@pytest.mark.usefixtures("installed")
def test_copies_are_those_between_devices() -> None:
    x = torch.zeros(2)
    for copy in (x.cuda(), x.to(0), x.to("cuda:1"), x.to(torch.device("cuda")), x.cpu(), x.to(device="cuda")):
        copy += 1
        assert copy.device.type == "cpu"
        assert x.tolist() == [0, 0]
    assert x.to(torch.float32) is x  # no device is named
    assert x.to(torch.zeros(1)) is x
    model = nn.Linear(2, 2).to(1).cuda()
    best = {name: value.cpu() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.weight += 1
    assert not torch.equal(best["weight"], model.weight)
    leaf = torch.ones(1, requires_grad=True)
    (leaf.cuda() * 2).backward()
    assert leaf.grad is not None
    assert leaf.grad.item() == 2


@pytest.mark.usefixtures("installed")
def test_what_names_a_gpu(tmp_path: Path) -> None:
    assert torch.ones(2, device="cuda:0").device == torch.tensor([1.0], device=0).device == torch.device("cpu")
    torch.save(torch.ones(1), tmp_path / "x")
    assert torch.load(tmp_path / "x", map_location="cuda:0").item() == 1
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert nn.Linear(2, 2).cuda()(torch.ones(1, 2, device="cuda")).dtype == torch.bfloat16
    assert not torch.cuda.is_available()
    with pytest.raises(RuntimeError, match="no GPU here whose time"):
        torch.cuda.Event(enable_timing=True).elapsed_time(torch.cuda.Event())


@pytest.mark.usefixtures("installed")
def test_names_of_torch_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    assert isinstance(generator, torch.Generator)
    expected = torch.randn(2, generator=torch.Generator().manual_seed(3))
    assert torch.equal(torch.randn(2, device="cuda", generator=generator), expected)
    torch.cuda.manual_seed(5)
    drawn = torch.randn(2, device="cuda")
    torch.manual_seed(5)
    assert torch.equal(torch.randn(2), drawn)
    properties = torch.cuda.get_device_properties(0)
    assert properties.total_memory == torch.cuda.mem_get_info()[1] > 2**20
    assert torch.cuda.get_device_capability() == (properties.major, properties.minor) == (0, 0)
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
    assert "no memory" in torch.cuda.memory_summary()
    assert capsys.readouterr().err.count("is 0, and its device has the host's memory") <= 1  # once in a process
    assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
    x = torch.ones(2).cuda()
    x.record_stream(torch.cuda.current_stream())
    assert x.type("torch.cuda.DoubleTensor").dtype == torch.float64
    with torch.cuda.nvtx.range("forward"):
        torch.cuda.nvtx.range_push("step")
    with pytest.raises(RuntimeError, match="CUDA graphs record what a GPU does"):
        torch.cuda.CUDAGraph()


SPAWNED = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()

def data():
    return torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator("cuda").manual_seed(1))

def train(rank, world, parts):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", sys.argv[1]
    dist.init_process_group("nccl", rank=rank, world_size=world)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(net()).to(rank)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    mine = data().to(rank)[parts[rank]]
    model(mine).pow(3).sum().backward()
    alone = net()
    alone(data()).pow(3).sum().backward()
    for (name, found), expected in zip(model.module.named_parameters(), alone.parameters()):
        torch.testing.assert_close(found.grad * world, expected.grad, rtol=1e-9, atol=1e-9)
    for found, expected in zip(model.module.buffers(), alone.buffers()):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    model.eval()
    model(mine)
    dist.destroy_process_group()
    print("as one process", rank)

if __name__ == "__main__":
    count = torch.cuda.device_count()
    mp.spawn(train, args=(count, [slice(0, 3), slice(3, 7)]), nprocs=count)
    mp.spawn(train, args=(3, None), nprocs=3)
"""


def test_spawned_functions_and_batch_norm_over_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNED)
    done = Run(["run", "-n", "2", "--compat", "torch", "train.py", str(free_port())], tmp_path).finish()
    for rank in range(2):
        assert f"[{rank}] as one process {rank}" in done.stdout
    assert done.returncode != 0
    assert "mp.spawn(nprocs=3), but 2 ranks are running on this host" in done.stderr


def test_it_is_undone() -> None:
    before = torch.cuda.device_count, torch.distributed.init_process_group
    compat.install()
    compat.install()
    assert torch.cuda.device_count() == 1
    assert any("compat.torch" in patch.why for patch in active_patches())
    compat.uninstall()
    assert (torch.cuda.device_count, torch.distributed.init_process_group) == before
    x = torch.zeros(1)
    assert x.cpu() is x
    with pytest.raises((RuntimeError, AssertionError)):
        x.cuda()
