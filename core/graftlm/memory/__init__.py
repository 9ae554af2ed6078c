"""Who holds which page of KV memory: host side, numpy, no torch."""

from graftlm.memory.kv_manager import KVManager, KVUsage, Reuse
from graftlm.memory.lower_tiers import LowerTiers
from graftlm.memory.page_pool import PagePool
from graftlm.memory.request_table import RequestTable
from graftlm.memory.transfer_queue import TransferQueue

__all__ = ["KVManager", "KVUsage", "LowerTiers", "PagePool", "RequestTable", "Reuse", "TransferQueue"]
