"""Blocks are copied to host memory and back unchanged; a layer waits only for its own loads."""

import threading

import numpy as np
import pytest
import torch

from graftlm.contracts import AttentionBackend, AttentionLayer, BlockCopy, StepCopies
from graftlm.execution.awaiting_attention import AwaitingAttention
from graftlm.execution.block_mover import BlockMover
from graftlm.execution.kv_store import KVStore

LATENT = AttentionLayer(1, 4, 1, 16, 1.0, value_prefix_dim=12)  # a layer that stores only keys
LAYERS = [AttentionLayer(0, 4, 2, 8, 1.0), LATENT]
CPU = torch.device("cpu")


def make_kv(dtype=torch.float32, num_pages=8, page_size=2):
    kv = KVStore(LAYERS, num_pages, page_size, dtype, CPU)
    for layer in LAYERS:
        for tensor in (kv.keys(layer.layer_id), kv.values(layer.layer_id)):
            tensor.copy_(torch.randn(tensor.shape) * (1 if dtype.is_floating_point else 40))
        for scales in (kv.key_scales(layer.layer_id), kv.value_scales(layer.layer_id)):
            if scales is not None:
                scales.copy_(torch.randn(scales.shape))
    return kv


def content(kv, *pages):
    ids = torch.tensor(pages)
    return [t[ids].clone() for layer in LAYERS for t in kv.stored(layer.layer_id)]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def part(slot, *pages, first_page=0):
    return BlockCopy(slot, first_page, np.array(pages, dtype=np.int32))


@pytest.fixture
def make_mover():
    movers = []

    def make(kv):
        movers.append(BlockMover(kv, CPU))
        return movers[-1]

    yield make
    for mover in movers:
        mover.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_blocks_are_unchanged_after_a_store_and_a_load(make_mover, dtype):
    kv = make_kv(dtype)
    mover = make_mover(kv)
    mover.allocate(3, 2)
    before = content(kv, 5, 1)
    mover.copy(StepCopies(stores=(part(2, 5, 1),)))
    mover.copy(StepCopies(loads=(part(2, 0, 3),)))
    assert same(content(kv, 0, 3), before)
    mover.copy(StepCopies(loads=(part(2, 7, first_page=1),)))
    assert same(content(kv, 7), content(kv, 1))


def test_a_block_has_keys_then_values_of_each_layer_for_any_page_size(make_mover):
    kv = make_kv(page_size=2)
    mover = make_mover(kv)
    memory = mover.allocate(3, 2)
    mover.copy(StepCopies(stores=(part(1, 5, 1),)))
    expected = b"".join(tensor.numpy().tobytes() for tensor in content(kv, 5, 1))
    assert memory[1].tobytes() == expected
    assert memory.shape == (3, 2 * kv.page_bytes)


def test_early_copies_end_before_the_step_and_the_others_with_it(make_mover):
    kv = make_kv()
    mover = make_mover(kv)
    mover.allocate(3, 1)
    old, other = content(kv, 4), content(kv, 6)
    copies = StepCopies(early_stores=(part(0, 4),), early_loads=(part(0, 5),), stores=(part(1, 6),))
    with mover.overlapped(copies):
        assert same(content(kv, 5), old)
        kv.keys(0)[4] = 0
    mover.copy(StepCopies(loads=(part(0, 2), part(1, 3))))
    assert same(content(kv, 2), old)
    assert same(content(kv, 3), other)


class HeldBack(KVStore):
    """Gives the last layer's memory to the copying thread only after its gate opens."""

    def __init__(self, gate):
        super().__init__(LAYERS, 8, 2, torch.float32, CPU)
        self.gate = gate

    def stored(self, layer_id):
        if layer_id == 1 and threading.current_thread() is not threading.main_thread():
            assert self.gate.wait(10)
        return super().stored(layer_id)


class Noting(AttentionBackend):
    """Records which layers have run."""

    def __init__(self):
        self.layers = []

    def prepare(self, batch):
        self.layers.append("prepare")

    def forward(self, q, k, v, layer):
        self.layers.append(layer.layer_id)
        return q


def test_a_layer_waits_only_for_its_own_loads(make_mover):
    gate = threading.Event()
    mover = make_mover(HeldBack(gate))
    mover.allocate(3, 1)
    inner = Noting()
    attention = AwaitingAttention(inner, mover.await_layer)
    q = torch.zeros(1)
    with mover.overlapped(StepCopies(loads=(part(0, 4),))):
        attention.prepare(None)
        attention.forward(q, q, q, LAYERS[0])  # while the copy of layer 1 is not finished
        assert inner.layers == ["prepare", 0]
        threading.Timer(0.01, gate.set).start()
        attention.forward(q, q, q, LAYERS[1])
        assert gate.is_set()
    attention.forward(q, q, q, LAYERS[1])
    assert inner.layers == ["prepare", 0, 1, 1]


def test_a_failed_copy_fails_only_its_step(make_mover):
    kv = make_kv()
    mover = make_mover(kv)
    mover.allocate(1, 1)
    with pytest.raises(IndexError), mover.overlapped(StepCopies(loads=(part(3, 4),))):
        mover.await_layer(1)  # no thread waits forever
    mover.copy(StepCopies(loads=(part(0, 4),)))
