"""The choice of a replica for each request: digests of prompts, changes of caches as blocks, and the router.

The arrows show how data flows. This package contains no policy; the family `routing_policy` provides policies:

prompt ─ BlockDigests ─ Route ──> Router.choose ──> policy.choose ──> replica
replica's CacheEvents ─ BlockLedger ─ BlockChange ──> Router.report ──> policy.stored, policy.removed, policy.cleared
"""

from graftlm.routing.block_digests import BlockDigests
from graftlm.routing.block_ledger import BlockChange, BlockLedger
from graftlm.routing.router import Route, Router

__all__ = ["BlockChange", "BlockDigests", "BlockLedger", "Route", "Router"]
