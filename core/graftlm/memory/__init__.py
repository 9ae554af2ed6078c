"""Manages the pages of KV memory on the host, with numpy and without torch."""

from graftlm.memory.feature_pool import FeaturePool
from graftlm.memory.kv_manager import KVManager, Reuse
from graftlm.memory.lower_tiers import LowerTiers
from graftlm.memory.page_owners import KVUsage
from graftlm.memory.page_pool import PagePool
from graftlm.memory.request_table import RequestTable
from graftlm.memory.row_states import RowStates
from graftlm.memory.row_windows import RowWindows
from graftlm.memory.state_pool import StatePool
from graftlm.memory.transfer_queue import TransferQueue
from graftlm.memory.window_pages import WindowPages, WindowSpan

__all__ = [
    "FeaturePool",
    "KVManager",
    "KVUsage",
    "LowerTiers",
    "PagePool",
    "RequestTable",
    "Reuse",
    "RowStates",
    "RowWindows",
    "StatePool",
    "TransferQueue",
    "WindowPages",
    "WindowSpan",
]
