"""A fake device that also runs the copies of steps, each at the worst time that the contract allows."""

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import BlockCopy, StepCopies
from graftlm.plan import StepPlan, StepResult
from graftlm.testing.fake_device import FakeDevice

__all__ = ["CopyingDevice"]


class CopyingDevice(FakeDevice):
    """A `FakeDevice` with host memory, for caches with lower tiers.

    On a real device, a copy in parallel with a step may run before or after the step. This device runs the stores that
    are not early after the step. If a store should have been early, it therefore reads overwritten data. New host
    memory contains garbage.

    Attributes:
        page_bytes: size of a page's digests in bytes.
    """

    def __init__(self, num_pages: int, page_size: int, num_rows: int, vocab_size: int) -> None:
        super().__init__(num_pages, page_size, num_rows, vocab_size)
        self.page_bytes = 8 * page_size
        self._host: NDArray[np.uint64] = np.empty((0, 0), dtype=np.uint64)

    def allocate(self, num_blocks: int, pages_per_block: int) -> NDArray[np.uint8]:
        """Allocate host memory, uint8 [num_blocks, pages_per_block * page_bytes]; see `KVTransfer.allocate`."""
        memory: NDArray[np.uint8] = np.full((num_blocks, pages_per_block * self.page_bytes), 0x5A, dtype=np.uint8)
        self._host = memory.view(np.uint64)
        return memory

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step with its copies."""
        copies = plan.copies or StepCopies()
        self._store(copies.early_stores)
        self._load((*copies.early_loads, *copies.loads))
        result = super().run(plan)
        self._store(copies.stores)
        return result

    def copy(self, copies: StepCopies) -> None:
        """Run copies without a step."""
        self._store(copies.early_stores)
        self._load((*copies.early_loads, *copies.loads))
        self._store(copies.stores)

    def close(self) -> None:
        """Do nothing."""

    def _store(self, copies: tuple[BlockCopy, ...]) -> None:
        for copy in copies:
            self._host[copy.slot, self._part(copy)] = [self._digests[slot] for slot in self._slots(copy)]

    def _load(self, copies: tuple[BlockCopy, ...]) -> None:
        for copy in copies:
            digests = self._host[copy.slot, self._part(copy)].tolist()
            for slot, digest in zip(self._slots(copy), digests, strict=True):
                self._digests[slot] = digest

    def _part(self, copy: BlockCopy) -> slice:
        start = copy.first_page * self._page_size
        return slice(start, start + len(copy.pages) * self._page_size)

    def _slots(self, copy: BlockCopy) -> list[int]:
        size = self._page_size
        return [int(page) * size + offset for page in copy.pages.tolist() for offset in range(size)]
