"""Sets up the replay of steps with one token per request: CUDA graphs on a GPU, or recorded steps on a CPU."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from graftlm.config import EngineConfig
from graftlm.contracts import AttentionBackend, AttentionCapabilities, ForwardBatch, Model
from graftlm.errors import ConfigError, GraphCaptureError
from graftlm.execution.decode_inputs import DecodeInputs, DecodeShape
from graftlm.execution.graphs import CudaCapture, DecodeGraphs, EagerCapture, graph_sizes
from graftlm.execution.kv_store import KVStore
from graftlm.execution.recorded_steps import MAX_RECORDED_SIZE, RecordedSteps
from graftlm.execution.state_store import StateStore

__all__ = ["capture_graphs", "captured_sizes", "graphs_obstacle", "recorded_steps", "wants_graphs"]

_logger = logging.getLogger(__name__)


def graphs_obstacle(can: AttentionCapabilities, device: torch.device) -> str | None:
    """Return why an attention backend's one-token steps cannot be captured as graphs on a device; None if they can."""
    if device.type != "cuda":
        return f"a {device.type} device has no CUDA graphs"
    return None if can.graph else "the attention backend does not support CUDA graphs"


def wants_graphs(
    config: EngineConfig, can: AttentionCapabilities, device: torch.device, *, has_states: bool = False
) -> bool:
    """Return whether one-token steps are padded to captured batch sizes and replayed.

    Args:
        has_states: whether the model has a recurrent state.

    Raises:
        ConfigError: `execution.graphs` is true, but the attention backend cannot be captured on this GPU, or the model
            has a recurrent state.
    """
    setting = config.execution.graphs
    if has_states:
        if setting is True:
            raise ConfigError(
                "execution.graphs is true, but steps of a model with a recurrent state cannot be captured. Set "
                "execution.graphs: auto"
            )
        return False
    obstacle = graphs_obstacle(can, device)
    if setting == "auto":
        return obstacle is None
    if setting and obstacle is not None and device.type == "cuda":
        raise ConfigError(f"execution.graphs is true, but {obstacle}. Set attention.name, or execution.graphs: auto.")
    return setting


def captured_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Return the batch sizes, in requests, for which a step is captured."""
    return config.execution.graph_batch_sizes or graph_sizes(config.scheduling.max_running_requests)


def capture_graphs(
    config: EngineConfig,
    forward: Callable[[ForwardBatch], Tensor],
    attention: AttentionBackend,
    kv: KVStore,
    max_pages: int,
    on_stage: Callable[[str], None],
) -> DecodeGraphs | None:
    """Capture one-token steps of every batch size.

    Args:
        forward: the model's forward pass.
        attention: the backend to which the model is bound.
        kv: the KV tensors, with one spare page. The separate memory of sliding-window layers, if any, also has one.
        max_pages: maximum number of pages of a request.
        on_stage: function that is called with a text for every batch size.

    Returns: None if the steps cannot be captured and `execution.graphs` is auto. The log contains the reason.

    Raises:
        GraphCaptureError: the steps cannot be captured, and `execution.graphs` is true.
    """
    sizes = captured_sizes(config)
    shape = DecodeShape(
        num_rows=config.scheduling.max_running_requests,
        max_size=max(sizes),
        max_pages=max_pages,
        page_size=kv.page_size,
        spare_pages=(kv.num_pages, kv.num_window_pages) if kv.has_window_memory else (kv.num_pages,),
    )
    capture = CudaCapture(kv.device) if kv.device.type == "cuda" else EagerCapture()
    free_bytes = _free_bytes(kv.device)
    try:
        graphs = DecodeGraphs(
            DecodeInputs(shape, kv.device),
            sizes,
            attention,
            forward,
            capture,
            on_size=lambda size: on_stage(f"capturing graphs, batch size {size}"),
        )
    except GraphCaptureError:
        if config.execution.graphs is True:
            raise
        _logger.warning("decode steps run without CUDA graphs, which is slower", exc_info=True)
        return None
    if free_bytes is not None:
        graph_bytes = free_bytes - (_free_bytes(kv.device) or 0)
        _logger.info("%d CUDA graphs are captured and use %.2f GiB", len(sizes), graph_bytes / (1 << 30))
    return graphs


def recorded_steps(
    config: EngineConfig,
    model: Model,
    forward: Callable[[ForwardBatch], Tensor],
    attention: AttentionBackend,
    device: torch.device,
    *,
    has_adapters: bool,
    states: StateStore | None = None,
) -> RecordedSteps | None:
    """Return the recorder of one-token steps on a CPU; None if they cannot be recorded. The log contains the reason.

    Args:
        forward: the model's forward pass; it may also return inputs of layers.
        has_adapters: whether requests may use adapters.
        states: the recurrent states to which the model is bound; None if it has none.
    """
    if device.type != "cpu" or config.execution.graphs != "auto":
        return None
    if not model.repeats_calls:
        obstacle = "the model does not declare that each step makes the same kernel calls"
    elif not attention.repeats_calls:
        obstacle = "the attention backend does not declare that each step makes the same kernel calls"
    elif has_adapters:
        obstacle = "adapters change the kernel calls of a step"
    else:
        _logger.info(
            "decode steps of up to %d requests are recorded, and their kernel calls are repeated", MAX_RECORDED_SIZE
        )
        tensors = () if states is None else states.tensors
        return RecordedSteps(attention, forward, config.scheduling.max_running_requests, states=tensors)
    _logger.info("decode steps are not recorded: %s", obstacle)
    return None


def _free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a CUDA device; None for a CPU, where graphs use no memory."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
