"""Finds the compiled kernels of an installed package, which are in a folder next to their sources.

    graftlm/layers/panel_matmul.cpp
    graftlm/layers/compiled/avx512-bf16/panel_matmul-<key>.so

The key is a hash of the source, the headers that it includes and the compiler's flags. A kernel whose source was edited
later is therefore not found. Kernels are not linked with torch, so one file works with every version of torch.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from graftlm.layers.kernel_key import shipped_name
from graftlm.layers.kernel_levels import KernelLevel
from graftlm.layers.sealed_file import find_damage

__all__ = ["find_shipped"]

_logger = logging.getLogger(__name__)


def find_shipped(
    source: Path, flags: Sequence[str], include_dir: Path, levels: Sequence[KernelLevel]
) -> tuple[Path, KernelLevel] | None:
    """Return the first shipped library of a source, and its level; None if there is none.

    Args:
        source: a C++ file.
        flags: compiler flags in addition to those of every kernel and of the level.
        include_dir: folder of the headers that kernels share.
        levels: levels that may be loaded, best first.
    """
    folder = source.parent / "compiled"
    if not folder.is_dir():
        return None
    for level in levels:
        library = folder / shipped_name(source, include_dir, level, flags)
        if not library.is_file():
            continue
        damage = find_damage(library.read_bytes())
        if damage is None:
            return library, level
        _logger.warning("the kernel %s of the installed package %s. It is not used", library, damage)
    return None
