"""The fake CUDA device: allowed calls, refused calls, and error messages."""

from contextlib import suppress

import numpy as np
import pytest
import torch

from graftlm.execution.readback import CudaReadback
from graftlm.testing.fake_cuda import FakeCuda
from graftlm.testing.fake_cuda_errors import EarlyReadError, GraphRegionError, HiddenSyncError, MixedDevicesError
from graftlm.testing.fake_cuda_region import FakeCapture


def on_host(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def pinned(*shape):
    return on_host(*shape).pin_memory()


@pytest.fixture
def cuda():
    with FakeCuda() as it:
        yield it


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x[on_host(2)],
        lambda x: x.index_select(0, on_host(2)),
        lambda x: x + torch.tensor(1),
        lambda x: torch.where(x > 0, x, torch.tensor(0)),
        lambda x: torch.cat([x, on_host(4, 8)]),
        lambda x: x.__setitem__(0, on_host(8)),
        lambda x: torch.add(x, 1, out=on_host(4, 8)),
    ],
)
def test_tensors_of_two_devices_are_refused(call):
    with pytest.raises(MixedDevicesError, match="one on the CPU"), FakeCuda() as cuda:
        call(torch.zeros(4, 8, dtype=torch.int64, device=cuda.device))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: x.numpy(),
        lambda x: bool(x.any()),
        lambda x: int(x[0, 0]),
        lambda x: float(x[0, 0]),
        lambda x: range(x[0, 0]),
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 0),
        lambda x: x[x > 0],
        lambda x: x.__setitem__(x > 0, 1),
        lambda x: x[x[0, 0]],
        lambda x: x[[0, 1]],
        lambda x: x[np.array([0, 1])],
        lambda x: x.unique(),
        lambda x: torch.repeat_interleave(x[0]),
        lambda x: torch.equal(x, x),
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: x.new_tensor([1]),
        lambda x: on_host(2).to(x.device),
        lambda x: on_host(2).to(x.device, non_blocking=True),
        lambda x: pinned(2).to(x.device),
        lambda x: pinned(2, 4)[:, :2].to(x.device, non_blocking=True),
        lambda x: pinned(2).to(x.device, torch.int32, non_blocking=True),
        lambda x: on_host(4, 8).copy_(x, non_blocking=True),
        lambda x: pinned(4, 8).copy_(x),
        lambda x: x.copy_(on_host(4, 8)),
    ],
)
def test_waiting_for_the_device_is_refused(call):
    with pytest.raises(HiddenSyncError), FakeCuda() as cuda:
        call(torch.zeros(4, 8, dtype=torch.int64, device=cuda.device))


def test_calls_that_do_not_wait_on_a_gpu_are_allowed(cuda):
    x = torch.arange(32, device=cuda.device).view(4, 8)
    idx = pinned(3).to(cuda.device, non_blocking=True)
    x[1:3, ::2] = 5
    x[idx] = x[idx, :] + 1
    x[..., 0].copy_(x[:, 1])
    parts = [x[idx], x[1:3, ::2], x[-1], x[:, None, idx], x[..., 1:], x.masked_fill(x > 3, 0), x.T.contiguous()]
    assert [list(part.shape) for part in parts] == [[3, 8], [2, 4], [8], [4, 1, 3], [4, 7], [4, 8], [8, 4]]
    assert {part.device for part in parts} == {torch.device("cuda", 0)}
    assert list(x[1:3, ::2].stride()) == [8, 2]
    assert x[1:3, 3].storage_offset() == 11
    with pytest.raises(IndexError):
        x[4]


def test_tensors_of_the_cpu_have_real_values(cuda):
    words = torch.empty(4, dtype=torch.int64, pin_memory=True)
    words.numpy()[:] = 3
    assert words.is_pinned()
    assert words[1:].is_pinned()
    assert words.sum().item() == 12
    assert not torch.from_numpy(np.zeros(2)).is_pinned()


def test_blocking_allows_waiting_and_values_are_ones(cuda):
    with cuda.blocking("a test"):
        x = torch.tensor([1.0, 2.0]).to(cuda.device)
        assert bool(x.isfinite().all())
        assert x.cpu().tolist() == [1.0, 1.0]


def test_results_can_be_read_only_after_their_event():
    with FakeCuda() as cuda:
        readback = CudaReadback(cuda.streams)
        host = readback.fetch(torch.ones(3, device=cuda.device))
        readback.close()
        readback.wait()
        assert host.numpy().tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(EarlyReadError), FakeCuda() as cuda:
        CudaReadback(cuda.streams).fetch(torch.ones(3, device=cuda.device)).numpy()


def test_an_event_of_another_stream_does_not_make_results_readable(cuda):
    host, event = torch.empty(3, pin_memory=True), cuda.streams.event()
    with cuda.streams.use(cuda.streams.stream()):
        host.copy_(torch.ones(3, device=cuda.device), non_blocking=True)
    event.record()
    event.synchronize()
    with pytest.raises(EarlyReadError):
        host.tolist()
    cuda.forget()


def test_a_stream_that_waits_for_another_stream_covers_its_copies(cuda):
    host, other = torch.empty(3, pin_memory=True), cuda.streams.stream()
    with cuda.streams.use(other):
        host.copy_(torch.ones(3, device=cuda.device), non_blocking=True)
    cuda.streams.current().wait_stream(other)
    event = cuda.streams.event()
    event.record()
    event.synchronize()
    assert host.tolist() == [0.0, 0.0, 0.0]


def test_waiting_for_an_event_is_refused_while_a_step_is_launched(cuda):
    event = cuda.streams.event()
    event.record()
    with pytest.raises(HiddenSyncError, match="synchronize"), cuda.launching():
        event.synchronize()
    cuda.forget()


def test_kernels_accept_only_tensors_of_the_device(cuda):
    cuda.launched("kernel", [(1, 1, 1), torch.zeros(2, device=cuda.device)])
    with pytest.raises(MixedDevicesError, match="kernel"):
        cuda.launched("kernel", [on_host(2)])
    cuda.forget()


def test_a_replay_with_other_calls_than_the_capture_is_refused(cuda):
    tensors = [torch.zeros(2, device=cuda.device)]
    replay = FakeCapture(cuda.region).capture(lambda: tensors[-1].add_(1))
    replay()
    tensors.append(torch.zeros(2, device=cuda.device))
    with pytest.raises(GraphRegionError, match="call 0"):
        replay()


def test_a_suppressed_error_is_raised_at_the_end():
    with pytest.raises(HiddenSyncError), FakeCuda() as cuda, suppress(HiddenSyncError):
        torch.ones(2, device=cuda.device).sum().item()
