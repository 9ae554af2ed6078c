"""Who runs in the next step: host side, no torch."""

from graftlm.scheduling.request import Request, RequestStatus
from graftlm.scheduling.scheduler import Scheduler, SchedulerLimits
from graftlm.scheduling.updates import Finish, RequestUpdate

__all__ = ["Finish", "Request", "RequestStatus", "RequestUpdate", "Scheduler", "SchedulerLimits"]
