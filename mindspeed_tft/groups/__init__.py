"""Process groups whose members keep the same Python object while the backend below is aborted or replaced."""

from mindspeed_tft.groups.audit import LockstepBroken
from mindspeed_tft.groups.process_group import CommunicationAborted, GroupTable, SwappableGroup

__all__ = ["CommunicationAborted", "GroupTable", "LockstepBroken", "SwappableGroup"]
