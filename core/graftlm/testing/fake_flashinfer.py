"""A fake of FlashInfer for a fake CUDA device. The fake wrappers check their arguments and launch nothing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from graftlm.testing.fake_cuda import FakeCuda
from graftlm.testing.fake_cuda_errors import FakeCudaError, GraphRegionError, HiddenSyncError

__all__ = ["FakeFence", "FakeFlashInfer"]


class FakeFlashInfer:
    """A factory of fake wrappers, whose methods have the signatures of FlashInfer's constructors.

    Args:
        cuda: fake device.

    Attributes:
        num_runs: role (decode, prefill or cascade) -> number of runs of the wrappers with this role.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.num_runs = {"decode": 0, "prefill": 0, "cascade": 0}

    def decode(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> "_Decode":
        """Create a fake of BatchDecodeWithPagedKVCacheWrapper."""
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        return _Decode(self, float_workspace_buffer, kv_layout, buffers if use_cuda_graph else None)

    def prefill(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", backend: str = "auto") -> "_Prefill":
        """Create a fake of BatchPrefillWithPagedKVCacheWrapper."""
        return _Prefill(self, "prefill", float_workspace_buffer, kv_layout)

    def cascade(self, num_levels: int, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> "_Cascade":
        """Create a fake of MultiLevelCascadeAttentionWrapper."""
        return _Cascade(self, num_levels, float_workspace_buffer, kv_layout)


class FakeFence:
    """A `flashinfer_planner.Fence` that never makes the host wait, like a real fence whose step has been committed.

    FlashInfer's plans are the only part of a launch that may wait for the device.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        self._event = cuda.streams.event()

    def wait(self) -> None:
        """Do nothing."""

    def record(self) -> None:
        """Record the event."""
        self._event.record()


class _Wrapper:
    """The common part of the fake decode and prefill wrappers."""

    def __init__(self, library: FakeFlashInfer, role: str, workspace: Tensor, kv_layout: str) -> None:
        _check(kv_layout == "NHD", f"layout {kv_layout}")
        _check_device(workspace, torch.uint8, "workspace")
        self._library = library
        self._role = role
        self._workspace = workspace
        self._num_tokens: int | None = None
        self._shape = (0, 0, 0, 0)  # num_heads, num_kv_heads, head_dim, page_size
        self._dtypes: tuple[torch.dtype, torch.dtype] | None = None
        self._planned: tuple[Tensor, ...] = ()  # tensors of the plan that a run reads

    def _plan(
        self, num_tokens: int, shape: Sequence[int], settings: dict[str, Any], planned: tuple[Tensor, ...]
    ) -> None:
        if self._library.cuda.in_region:
            raise GraphRegionError("a captured function calls plan(), but a graph cannot capture work of the host")
        num_heads, num_kv_heads, head_dim, page_size = shape
        self._num_tokens = num_tokens
        self._shape = (num_heads, num_kv_heads, head_dim, page_size)
        self._dtypes = (settings["q_data_type"], settings["kv_data_type"])
        self._planned = planned

    def _check_run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], out: Tensor | None) -> None:
        num_heads, num_kv_heads, head_dim, page_size = self._shape
        _check(self._dtypes is not None, "a run before a plan")
        q_dtype, kv_dtype = self._dtypes or (None, None)
        for tensor, name in ((q, "q"), *([] if out is None else [(out, "out")])):
            _check_device(tensor, q_dtype, name)
            shape = (self._num_tokens, num_heads, head_dim)
            _check(tuple(tensor.shape) == shape, f"{name} of shape {list(tensor.shape)}, but planned {list(shape)}")
        for tensor in paged_kv_cache:
            _check_device(tensor, kv_dtype, "cache")
            page = (page_size, num_kv_heads, head_dim)
            _check(tuple(tensor.shape[1:]) == page, f"pages of {list(tensor.shape[1:])}, but planned {list(page)}")
        self._library.num_runs[self._role] += 1
        arguments = [q, paged_kv_cache, out, self._planned, self._workspace, self._shape]
        self._library.cuda.launched(f"flashinfer.{self._role}", arguments)

    def _indptr(self, indptr: Tensor, what: str) -> int:
        """Check an array of range bounds, int32 [n + 1] on the host; return the last bound."""
        _check_host(self._library.cuda, indptr, what)
        bounds = indptr.tolist()
        _check(bounds[0] == 0 and bounds == sorted(bounds), f"{what} {bounds}, which must start at 0 and be sorted")
        return int(bounds[-1])

    def _pages(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int) -> None:
        """Check the pages of requests.

        Args:
            indptr: bounds of each request's pages in `indices`, int32 [B + 1] on the host.
            indices: page ids of all requests, int32 on the device.
            last_page_len: number of tokens in the last page of each request, int32 [B] on the host.
            page_size: number of tokens in a page.
        """
        num_pages = self._indptr(indptr, "indptr of pages")
        _check_device(indices, torch.int32, "indices of pages")
        _check(len(indices) >= num_pages, f"{len(indices)} indices for {num_pages} pages")
        _check_host(self._library.cuda, last_page_len, "last_page_len")
        _check(len(last_page_len) + 1 == len(indptr), f"{len(last_page_len)} last pages and {len(indptr)} bounds")
        lens = last_page_len.tolist()
        _check(all(1 <= length <= page_size for length in lens), f"last_page_len {lens} for pages of size {page_size}")


class _Decode(_Wrapper):
    """Fake of BatchDecodeWithPagedKVCacheWrapper."""

    def __init__(
        self, library: FakeFlashInfer, workspace: Tensor, kv_layout: str, buffers: tuple[Tensor | None, ...] | None
    ) -> None:
        super().__init__(library, "decode", workspace, kv_layout)
        self._buffers: tuple[Tensor, ...] | None = None
        if buffers is not None:
            self._buffers = tuple([buffer for buffer in buffers if buffer is not None])
            _check(len(self._buffers) == len(buffers), "too few buffers for a graph")
            for buffer in self._buffers:
                _check_device(buffer, torch.int32, "buffer of a graph")

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Replace the workspaces by new ones, uint8 on the device."""
        _check_device(float_workspace_buffer, torch.uint8, "workspace")
        _check_device(int_workspace_buffer, torch.uint8, "integer workspace")
        self._workspace = float_workspace_buffer

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float | None = None,
    ) -> None:
        """Check the arguments of a plan; with a graph, also check that the graph's buffers are large enough."""
        self._pages(indptr, indices, last_page_len, page_size)
        planned = (indptr, indices, last_page_len)
        if self._buffers is not None:
            for buffer, array in zip(self._buffers, planned, strict=True):
                _check(len(array) <= len(buffer), f"{len(array)} entries for a graph's buffer of {len(buffer)} entries")
                buffer[: len(array)].copy_(array, non_blocking=True)
            _check(len(last_page_len) == len(self._buffers[2]), "more or fewer requests than the graph was made for")
            planned = (self._buffers[0], self._buffers[1], self._buffers[2])
        settings = {"q_data_type": q_data_type, "kv_data_type": kv_data_type}
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._plan(len(last_page_len), shape, settings, tuple(t for t in planned if isinstance(t, FakeTensor)))

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], out: Tensor | None = None) -> Tensor:
        """Check a launch."""
        self._check_run(q, paged_kv_cache, out)
        return torch.empty_like(q) if out is None else out


class _Prefill(_Wrapper):
    """Fake of BatchPrefillWithPagedKVCacheWrapper."""

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        """Check the arguments of a plan."""
        self._pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        _check(len(qo_indptr) == len(paged_kv_indptr), "different numbers of requests for queries and pages")
        settings = {"q_data_type": q_data_type, "kv_data_type": kv_data_type}
        shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._plan(self._indptr(qo_indptr, "indptr of queries"), shape, settings, (paged_kv_indices,))

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], out: Tensor | None = None) -> Tensor:
        """Check a launch."""
        self._check_run(q, paged_kv_cache, out)
        return torch.empty_like(q) if out is None else out


class _Cascade:
    """Fake of MultiLevelCascadeAttentionWrapper."""

    def __init__(self, library: FakeFlashInfer, num_levels: int, workspace: Tensor, kv_layout: str) -> None:
        self._levels = [_Prefill(library, "cascade", workspace, kv_layout) for _ in range(num_levels)]

    def plan(
        self,
        qo_indptr_arr: Sequence[Tensor],
        paged_kv_indptr_arr: Sequence[Tensor],
        paged_kv_indices_arr: Sequence[Tensor],
        paged_kv_last_page_len: Sequence[Tensor],
        *shape: Any,
        **settings: Any,
    ) -> None:
        """Check the arguments of each level's plan."""
        arrays = zip(qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, strict=True)
        for level, each in zip(self._levels, arrays, strict=True):
            level.plan(*each, *shape, **settings)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        """Check the arguments of a launch; return an uninitialised tensor with the shape of `q`."""
        for level in self._levels:
            level.run(q, paged_kv_cache)
        return torch.empty_like(q)


def _check(holds: bool, what: str) -> None:
    """Raise FakeCudaError if `holds` is false; `what` describes the wrong argument."""
    if not holds:
        raise FakeCudaError(f"FlashInfer gets {what}")


def _check_device(tensor: Tensor, dtype: torch.dtype | None, name: str) -> None:
    """Check a tensor that a kernel reads: it must be on the device, contiguous and of type `dtype`."""
    _check(isinstance(tensor, FakeTensor), f"{name} on the CPU")
    _check(tensor.dtype == dtype and tensor.is_contiguous(), f"{name}: {tensor.dtype}, strides {tensor.stride()}")


def _check_host(cuda: FakeCuda, tensor: Tensor, name: str) -> None:
    """Check a tensor that a plan reads on the host and copies: it must be int32, contiguous and pinned.

    Raises:
        HiddenSyncError: the tensor is on the device.
        FakeCudaError: another check fails.
    """
    if isinstance(tensor, FakeTensor):
        raise HiddenSyncError(f"FlashInfer reads {name} on the host, but it is on the device")
    _check(tensor.dtype == torch.int32 and tensor.is_contiguous(), f"{name}: {tensor.dtype}")
    _check(cuda.is_pinned(tensor), f"{name} in pageable memory")
