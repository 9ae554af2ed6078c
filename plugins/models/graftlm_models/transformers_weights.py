"""Converts a checkpoint's tensors to the names and shapes of Transformers' modules.

Transformers renames, stacks, splits and transposes tensors when it loads a checkpoint, with rules for every model type.
This module applies the same rules to a stream of tensors. If a rule joins several tensors, they are buffered until all
have arrived.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from graftlm.errors import WeightError

__all__ = ["CheckpointNames"]


class CheckpointNames:
    """The mapping between the names of tensors in a checkpoint and in a module.

    Args:
        module: a model of Transformers.
        targets: the module's tensors by name.
    """

    def __init__(self, module: Any, targets: Mapping[str, Tensor]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        rules = get_model_conversion_mapping(module)
        self._module = module
        self._targets = targets
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self._ignored = [re.compile(pattern) for pattern in module._keys_to_ignore_on_load_unexpected or ()]
        self._computed = {name for name, _ in module.named_buffers()} - targets.keys()
        self._names = {target: self._renamed_back(target) for target in targets} if self._renamings else {}

    def in_checkpoint(self, target: str) -> str:
        """Return a tensor's name in the checkpoint. If its shape differs there, return its name in the module."""
        return self._names.get(target, target)

    def converted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Convert (name in the checkpoint, tensor) to (`in_checkpoint` of the name in the module, tensor).

        Tensors that Transformers drops for this model type, or that the module computes, are dropped. Other unknown
        tensors keep their names.

        Raises:
            WeightError: tensors that are joined have inconsistent shapes.
        """
        pending: dict[str, _Group] = {}
        for name, tensor in weights:
            target, pattern = self._place(name)
            if pattern is None:
                if not self._is_dropped(target):
                    yield self.in_checkpoint(target) if target in self._targets else name, tensor
                continue
            group = pending.setdefault(target, self._group(target, pattern))
            group.add(name, pattern, tensor)
            if group.is_complete:
                yield from self._convert(target, pending.pop(target))
        for target, group in pending.items():
            yield from self._convert(target, group)

    def _renamed_back(self, target: str) -> str:
        """Return the checkpoint's name of the tensor `target`; `target` itself if no such name is found."""
        from transformers.core_model_loading import rename_source_key

        undoing = [rule.reverse_transform() for rule in reversed(self._renamings)]
        name, _ = rename_source_key(target, undoing, [], reverse=True)
        is_way_back = name not in self._targets and self._place(name) == (target, None)
        return str(name) if is_way_back else target

    def _is_dropped(self, target: str) -> bool:
        if target in self._targets:
            return False
        return target in self._computed or any(pattern.search(target) for pattern in self._ignored)

    def _place(self, name: str) -> tuple[str, str | None]:
        """Return the target's name, and the pattern of the rule that converts the tensor; None if no rule does."""
        from transformers.core_model_loading import rename_source_key

        prefix = self._module.base_model_prefix
        target, pattern = rename_source_key(name, self._renamings, self._converters, prefix, self._targets)
        if target not in self._targets and name in self._targets:
            return name, None
        return target, pattern

    def _group(self, target: str, pattern: str) -> _Group:
        rule = self._by_pattern[pattern]
        names = [target.replace(rule.target_patterns[0], other, 1) for other in rule.target_patterns]
        found = [self._targets[name] for name in names if name in self._targets]
        is_known = len(found) == len(names)
        return _Group(rule, sum(tensor.numel() for tensor in found) if is_known else None)

    def _convert(self, target: str, group: _Group) -> Iterator[tuple[str, Tensor]]:
        from transformers.core_model_loading import dot_natural_key

        rule = copy.deepcopy(group.rule)
        # Experts are stacked in the order of their numbers, not in the order of the files.
        for name, pattern, tensor in sorted(group.parts, key=lambda part: dot_natural_key(part[0])):
            rule.add_tensor(target, name, pattern, tensor)
        try:
            made: dict[str, Any] = rule.convert(target, model=self._module, config=self._module.config)
        except Exception as error:
            names = ", ".join(sorted(name for name, _, _ in group.parts)[:3])
            raise WeightError(f"The checkpoint's {names}, ... cannot be converted to {target!r}: {error}") from error
        for name, value in made.items():
            yield self.in_checkpoint(name), value[0] if isinstance(value, list) else value


@dataclass(slots=True)
class _Group:
    """Tensors of a checkpoint that one rule converts to tensors of the module.

    Attributes:
        rule: conversion rule of Transformers.
        num_elements: number of elements of all target tensors, which a rule does not change; None: unknown.
        num_arrived: number of elements of the tensors that have arrived.
        parts: (name, matched pattern, tensor) of the tensors that have arrived.
    """

    rule: Any
    num_elements: int | None
    num_arrived: int = 0
    parts: list[tuple[str, str, Tensor]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether all tensors have arrived."""
        return self.num_arrived == self.num_elements

    def add(self, name: str, pattern: str, tensor: Tensor) -> None:
        """Add a tensor."""
        self.parts.append((name, pattern, tensor))
        self.num_arrived += tensor.numel()
