"""What processes tell each other: collectives on nested data, objects, errors, and triggers.

Everything works alike with one process, where nothing is sent.
"""

from instep.distributed.collectives import all_reduce_, broadcast, gather, pad_across_processes, reduce
from instep.distributed.nested import find_batch_size, send_to_device
from instep.distributed.objects import (
    broadcast_object,
    broadcast_object_list,
    control_group,
    gather_object,
    raise_together,
    wait_for_everyone,
)
from instep.distributed.triggers import Trigger, Triggers

__all__ = [
    "Trigger",
    "Triggers",
    "all_reduce_",
    "broadcast",
    "broadcast_object",
    "broadcast_object_list",
    "control_group",
    "find_batch_size",
    "gather",
    "gather_object",
    "pad_across_processes",
    "raise_together",
    "reduce",
    "send_to_device",
    "wait_for_everyone",
]
