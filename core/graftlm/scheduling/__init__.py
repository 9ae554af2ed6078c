"""Decides which requests run in the next step. This package runs on the host and does not import torch."""

from graftlm.scheduling.forced_drafts import ForcedDrafts
from graftlm.scheduling.grammar import RequestGrammar
from graftlm.scheduling.jump_forward import JumpForward
from graftlm.scheduling.request import CompletionId, Request, RequestStatus
from graftlm.scheduling.scheduler import Scheduler, SchedulerLimits
from graftlm.scheduling.updates import Failure, Finish, RequestUpdate

__all__ = [
    "CompletionId",
    "Failure",
    "Finish",
    "ForcedDrafts",
    "JumpForward",
    "Request",
    "RequestGrammar",
    "RequestStatus",
    "RequestUpdate",
    "Scheduler",
    "SchedulerLimits",
]
