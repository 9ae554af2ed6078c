"""Loads the draft head of a served model, and connects it to the engine's steps."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from graftlm.assembly.draft_checkpoint import draft_head_options, option_place
from graftlm.assembly.plugin_choices import attention_misfit
from graftlm.assembly.weight_digests import WeightDigests
from graftlm.checkpoint import checkpoint_files, iter_weights, read_json, resolve_checkpoint, watch_reading
from graftlm.config import EngineConfig, Problem, origin_of
from graftlm.contracts import (
    AttentionCapabilities,
    AttentionLayer,
    Continuations,
    DrafterContext,
    DraftHead,
    DraftHeadBatch,
    DraftHeadContext,
    Model,
    ModelContext,
    Platform,
)
from graftlm.errors import ConfigError, InvariantError, ModelError
from graftlm.execution.executor import StepExecutor
from graftlm.execution.runner import ModelRunner
from graftlm.layers.kernel_build import user_cache_dir
from graftlm.layers.ops import bind_ops, choose_ops
from graftlm.memory import RequestTable
from graftlm.registry import Registry

__all__ = ["AssembledHead", "EngineHead", "HeadSource", "load_head", "plan_head"]


class EngineHead:
    """The draft head of an engine; implements `DraftHeads` after `bind`."""

    def __init__(self) -> None:
        self._runner: ModelRunner | None = None
        self._executor: StepExecutor | None = None
        self._table: RequestTable | None = None
        self._page_size = 1

    def bind(self, runner: ModelRunner, executor: StepExecutor, table: RequestTable, page_size: int) -> None:
        """Set the runner with the head, the executor of its steps, and the table of the requests' pages."""
        self._runner, self._executor, self._table, self._page_size = runner, executor, table, page_size

    def run(self, batch: DraftHeadBatch) -> Continuations:
        """Draft in the thread that runs the steps; see `DraftHeads`.

        Raises:
            InvariantError: the engine has not started.
        """
        runner, executor, table = self._runner, self._executor, self._table
        if runner is None or executor is None or table is None:
            raise InvariantError("a draft head was used before the engine has started")
        held = table.num_pages[batch.rows]
        room = held.astype(np.int64) * self._page_size - batch.lens + 2  # the first token needs no new slot
        limits = np.minimum(batch.limits, room).astype(np.int32)
        pages: NDArray[np.int32] = table.page_table[batch.rows, : int(held.max())]
        return executor.call(lambda: runner.draft(replace(batch, limits=limits), pages)).result().result()


@dataclass(frozen=True, slots=True)
class AssembledHead:
    """A loaded draft head.

    Attributes:
        head: the network.
        place: the head's checkpoint; None if the head is part of the served model's checkpoint.
        handle: the object that the drafter uses.
    """

    head: DraftHead
    place: Path | None
    handle: EngineHead

    def fingerprint(self, served: Callable[[], bytes]) -> Callable[[], bytes]:
        """Return a function like `served`, whose result also identifies the head."""

        def combined() -> bytes:
            digest = hashlib.blake2b(served(), digest_size=32, person=b"graftlm-head")
            if self.place is not None:
                digest.update((self.place / "config.json").read_bytes())
                for content in WeightDigests(user_cache_dir(os.environ) / "weights.json").of(
                    checkpoint_files(self.place)
                ):
                    digest.update(content)
            return digest.digest()

        return combined


@dataclass(frozen=True, slots=True)
class HeadSource:
    """The served model for which a head is created.

    Attributes:
        model, context, path: the served model, its context, and the path of its checkpoint.
        platform: kind of the device.
        attention: capabilities of the attention backend; None if they are not known yet.
    """

    model: Model
    context: ModelContext
    path: Path
    platform: Platform
    attention: AttentionCapabilities | None


def load_head(
    config: EngineConfig,
    source: HeadSource,
    make: Callable[[DraftHeadContext], DraftHead],
    path: str | None,
    watcher: Callable[[str], None] | None,
) -> AssembledHead:
    """Create a draft head and load its weights.

    Args:
        make: function that creates the head without weights.
        path: path of the head's checkpoint; None: the head is part of the served model's checkpoint.
        watcher: called with the progress of reading; None: progress is shown on a terminal.

    Raises:
        ConfigError: the head cannot be used. The message has the option's line in the configuration.
    """
    served = source.context
    try:
        place = None if path is None else resolve_checkpoint(path, "speculation.drafter.options.path")
        weights_place = source.path if place is None else place
        head = _create(source, make, served, place)
        if config.model.native_ops:  # before loading, because native kernels pack the weights when they are loaded
            bind_ops(head, choose_ops(served.device, served.dtype, user_cache_dir(os.environ)))
        with watch_reading(weights_place, watcher) as on_read:
            head.load_weights(iter_weights(weights_place, served.dtype, on_read=on_read, prefix=head.weight_prefix))
        if config.model.prepack:
            head.pack_weights()
        _check_attention(config, source, head.attention_layer)
    except ModelError as error:
        raise ConfigError(f"{_place(config, path)}: {_unfit(error)}") from error
    return AssembledHead(head, place, EngineHead())


def plan_head(config: EngineConfig, registry: Registry, source: HeadSource) -> DraftHead | None:
    """Return the configured draft head on the meta device; None if none is configured.

    Raises:
        ConfigError: the head cannot be used.
    """
    options = draft_head_options(config, registry)
    if options is None:
        return None
    found: list[DraftHead] = []

    def create(make: Callable[[DraftHeadContext], DraftHead], path: str | None) -> EngineHead:
        try:
            place = None if path is None else resolve_checkpoint(path, "speculation.drafter.options.path")
            context = replace(source.context, device=torch.device("meta"))
            found.append(_create(source, make, context, place))
        except ModelError as error:
            raise ConfigError(f"{_place(config, path)}: {_unfit(error)}") from error
        return EngineHead()

    name = cast(str, config.speculation.drafter.name)
    context = DrafterContext(lambda key, n: np.empty(0, np.int32), source.context.config.vocab_size, load_head=create)
    provider = registry.find("drafter", name)
    registry.create("drafter", provider, config.speculation.drafter.options, context, config.origins)
    return found[0] if found else None


def _create(
    source: HeadSource, make: Callable[[DraftHeadContext], DraftHead], served: ModelContext, place: Path | None
) -> DraftHead:
    """Create a head without weights.

    Raises:
        ModelError: the head does not fit the served model.
    """
    if not source.model.captures_inputs:
        raise ModelError(
            f"{type(source.model).__name__}, which computes {', '.join(served.config.architectures)}, does not return "
            "the hidden states that a draft head reads"
        )
    raw = served.config.raw if place is None else read_json(place / "config.json")
    head = make(DraftHeadContext(served, source.model, len(source.model.attention_layers), raw))
    if not isinstance(head, nn.Module) or head.attention_layer.sliding_window is not None:
        raise InvariantError(f"{type(head).__name__} must be a torch module, and its layer must have no window")
    return head


def _check_attention(config: EngineConfig, source: HeadSource, layer: AttentionLayer) -> None:
    """Refuse a head whose layer the attention backend does not support.

    Raises:
        ModelError: the backend does not support the layer.
    """
    if source.attention is None:
        return
    misfit = attention_misfit(source.attention, config, source.platform, [layer], source.context.dtype)
    if misfit is not None:
        raise ModelError(f"the attention backend does not fit the head: {misfit}")


def _place(config: EngineConfig, path: str | None) -> str:
    """Return the line and the path of the setting that selects the head, for messages."""
    if path is not None:
        return option_place(config, "path")
    name = ("speculation", "drafter")
    return str(Problem(name, "", origin_of(name, config.origins)))


def _unfit(error: Exception) -> str:
    return f"the draft head cannot be used: {error}"
