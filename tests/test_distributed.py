"""Many processes: samples and multipliers that stay on one rank, gradients of one process."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import ranks
import taut
from taut import LagrangeMemory
from taut.distributed import ShardSampler, sharded_memory

ROOT = Path(__file__).parent.parent


def launch(script, *args, processes=2):
    """`torchrun` without its supervisor, which takes longer than the tests."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes)}
    place["USE_LIBUV"] = "0"  # not in every torch: Debian's and some for Windows have none
    command = [sys.executable, "-W", "ignore", str(script), *map(str, args)]
    running = [
        subprocess.Popen(
            command,
            env={**os.environ, **place, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in running]
    assert all(process.returncode == 0 for process in running), "\n".join(outputs)
    return outputs


def test_two_ranks_are_one_process(tmp_path):
    """Weights and memory, with a dense and with a sparse A; and after a checkpoint."""
    launch(ROOT / "tests/ranks.py", tmp_path)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for sparse in (False, True):
        model, optimizer = ranks.started(sparse)
        memory = LagrangeMemory(ranks.N, 2)
        for number in range(ranks.EPOCHS):
            pairs = zip(*(ranks.epoch(rank, 2, number) for rank in range(2)), strict=True)
            ranks.train(model, memory, [torch.cat(pair) for pair in pairs], optimizer)
        for rank in range(2):
            own = found[rank][sparse]
            for prefix in ("", "resumed "):
                weight, table = own[prefix + "weight"], own[prefix + "memory"]
                assert_close(weight, model.net.weight.detach(), rtol=0, atol=1e-12)
                assert_close(table, memory.multipliers, rtol=0, atol=1e-11)
            assert own["rows"] == ranks.N // 2
            assert own["cold"] == [ranks.N // 2, 0, 0]
    assert memory.multipliers.abs().amin() > 0


def test_each_sample_has_one_rank():
    for samples, world in ((26, 4), (7, 2), (3, 3)):
        samplers = [ShardSampler(samples, rank=r, world_size=world) for r in range(world)]
        assert {len(list(sampler)) for sampler in samplers} == {len(samplers[0])}
        for number in range(3):
            for sampler in samplers:
                sampler.set_epoch(number)
                assert {i % world for i in sampler} == {sampler.rank}
            assert {i for sampler in samplers for i in sampler} == set(range(samples))
    order = [list(samplers[0])]
    sampler = ShardSampler(range(100), rank=1, world_size=2)
    orders = []
    for number in (0, 1, 0):
        sampler.set_epoch(number)
        orders.append(list(sampler))
    assert orders[0] == orders[2] != orders[1]
    assert order


def test_another_number_of_ranks_can_load():
    whole = LagrangeMemory(26, 2)
    whole.multipliers.normal_()
    index = torch.randperm(26)[:9]
    for world in (1, 3, 4):
        for rank in range(world):
            memory = sharded_memory(26, 2, rank=rank, world_size=world)
            memory.load_state_dict(whole.state_dict())
            own = index[index % world == rank]
            assert_close(memory[own], whole[own], rtol=0, atol=0)
            assert len(memory) == 26
            assert len(memory.multipliers) <= -(-26 // world)


@pytest.mark.usefixtures("as_user")
def test_what_is_refused():
    memory = sharded_memory(10, 2, rank=1, world_size=2)
    with pytest.raises(IndexError, match="sample 4 belongs to rank 0, and this is rank 1 of 2"):
        memory[torch.tensor([3, 4])]
    with pytest.raises(IndexError, match="must lie in 0 … 9; got 1 … 11"):
        memory[torch.tensor([1, 11])]
    with pytest.raises(ValueError, match="each of the 4 ranks needs a sample; got 3"):
        ShardSampler(3, rank=0, world_size=4)
    with pytest.raises(ValueError, match="rank must lie in 0 … 1; got 2"):
        sharded_memory(3, 1, rank=2, world_size=2)
    assert "rank=1, world_size=2" in repr(memory)


def test_a_training_step_with_a_part_of_the_table():
    """By `loss`, and by the three calls; rows of other samples stay as they are."""
    layer = taut.Projection(torch.randn(2, 5), activation="sigmoid")
    v, y, index = torch.randn(2, 5), torch.rand(2, 5), torch.tensor([3, 1])
    b = y @ layer.A.T
    memory, whole = sharded_memory(10, 2, rank=1, world_size=2), LagrangeMemory(10, 2)
    one = layer.loss(v, y, b, memory=memory, index=index)
    other = layer.loss(v, y, b, memory=whole, index=index)
    assert_close(one, other, rtol=0, atol=1e-14)
    assert_close(memory.multipliers, whole.multipliers[1::2], rtol=0, atol=1e-14)
    assert_close(whole.multipliers[::2], torch.zeros(5, 2), rtol=0, atol=0)


@pytest.mark.slow
def test_the_example_trains():
    command = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2"]
    command += [str(ROOT / "examples/distributed.py"), "--epochs", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "epoch 2" in done.stdout
