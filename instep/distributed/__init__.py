"""Communication between processes: collectives on nested tensors, exchange of objects and errors, and triggers.

With one process all functions work in the same way, and nothing is sent.

Checked mode (`INSTEP_DEBUG=1`, or `PartialState(debug=True)`): before each of these collectives all ranks compare the
operation, the names, shapes and dtypes of what they pass, and the file and line of the call. At the first difference,
every rank raises an error that shows the calls of all ranks. If a rank does not arrive within the process group's
time-out, the error names the rank and its last collective. Checked mode costs a message and a record in torch's
key-value store per collective, so use it only to find a bug.
"""

from typing import TYPE_CHECKING

from instep.distributed.collectives import all_reduce_, broadcast, gather, gather_ragged, pad_across_processes, reduce
from instep.distributed.nested import (
    concatenate,
    convert_to_fp32,
    find_batch_size,
    find_device,
    listify,
    pad_input_tensors,
    recursively_apply,
    send_to_device,
    slice_tensors,
)
from instep.distributed.objects import (
    broadcast_object,
    broadcast_object_list,
    control_group,
    gather_object,
    raise_together,
    wait_for_everyone,
)
from instep.distributed.triggers import Trigger, Triggers
from instep.utils.imports import loads

if TYPE_CHECKING:
    from instep.distributed.replicas import ReplicaDifference as ReplicaDifference
    from instep.distributed.replicas import compare_replicas as compare_replicas

__all__ = [
    "ReplicaDifference",
    "Trigger",
    "Triggers",
    "all_reduce_",
    "broadcast",
    "broadcast_object",
    "broadcast_object_list",
    "compare_replicas",
    "concatenate",
    "control_group",
    "convert_to_fp32",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "gather_ragged",
    "listify",
    "pad_across_processes",
    "pad_input_tensors",
    "raise_together",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
    "wait_for_everyone",
]

_, __getattr__, __dir__ = loads(__name__)
