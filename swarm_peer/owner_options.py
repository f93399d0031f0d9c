"""The options by which the owner of a machine keeps it for other uses, too, as part of peer_options.py: PeerOptions."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Group, Parameter
from pydantic import BaseModel, ConfigDict, Field, field_validator

from swarm_peer.policy.owner import Hours

# With less, others give a frame up before it is whole (runtime/network/frame_stream.py, SLOWEST_BYTES_PER_S).
LEAST_MBPS = 1.0
# A heading of --help, after all those of peer_options.py.
OWNER = Parameter(group=Group("The machine's owner"))


class OwnerOptions(BaseModel):
    """How much of the machine a peer takes, and when; each field is an option of swarm-peer."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    max_upload_mbps: Annotated[float | None, OWNER] = Field(None, ge=LEAST_MBPS)
    """Megabits per second that the peer sends at the most, all its traffic together; the whole link if not given."""
    max_download_mbps: Annotated[float | None, OWNER] = Field(None, ge=LEAST_MBPS)
    """Megabits per second that it receives from other peers at the most."""
    hours: Annotated[str | None, OWNER] = None
    """Part of the day, in local time, in which the peer serves, such as 22-7 or 8:30-17; otherwise it is paused."""
    pause_when_busy: Annotated[bool, OWNER, Parameter(negative="")] = False
    """Pause while another program uses the GPU, or somebody this machine's keyboard, where that can be seen."""
    max_upload_gb_per_day: Annotated[float | None, OWNER] = Field(None, gt=0)
    """Gigabytes that the peer may send in a day; before it has sent them it pauses, until midnight."""

    @field_validator("hours")
    @classmethod
    def _hours_are_part_of_a_day(cls, value: str | None) -> str | None:
        if value is not None:
            Hours.parse(value)
        return value
