import mmap

import numpy as np
import psutil

from graftlm.runtime.os_memory import discard_pages, trim_heap

MB = 1_000_000


def rss_bytes():
    return psutil.Process().memory_info().rss


def test_discarded_pages_take_no_memory_until_they_are_written():
    array = np.full(200 * MB, 7, dtype=np.uint8)
    used = rss_bytes()
    assert discard_pages(array.ctypes.data, array.nbytes)
    assert used - rss_bytes() > 190 * MB
    array.fill(9)
    assert abs(used - rss_bytes()) < 10 * MB
    assert array.min() == 9


def test_bytes_outside_the_range_and_in_partial_pages_are_unchanged():
    array = np.full(10 * mmap.PAGESIZE, 7, dtype=np.uint8)
    start = -array.ctypes.data % mmap.PAGESIZE + 100
    assert discard_pages(array.ctypes.data + start, mmap.PAGESIZE)  # contains no whole page
    assert array.min() == 7
    assert discard_pages(array.ctypes.data + start, 3 * mmap.PAGESIZE)
    kept = np.concatenate([array[: start + mmap.PAGESIZE - 100], array[start + 3 * mmap.PAGESIZE - 100 :]])
    assert kept.min() == 7


def test_the_heap_can_be_trimmed_at_any_time():
    held = [bytes(1000) for _ in range(1000)]
    trim_heap()
    assert sum(map(len, held)) == 1_000_000
