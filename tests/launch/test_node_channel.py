"""What the agents of a job tell each other in a round."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from instep.launch.node_channel import NodeChannel, open_round
from instep.launch.signed import SignedStore
from instep.state.secret import Secret


@pytest.mark.parametrize("kind", ["failed", "grow"])
def test_a_failed_round_counts_once_for_all_its_agents_though_another_node_had_come(kind):
    store = SignedStore(HashStore(), Secret(b"a" * 32), "job")
    for failures in range(3):
        name = str(failures)
        rounds = [open_round(store, store.below(name), node, "job") for node in (0, 1)]
        assert [each.failures for each in rounds] == [failures, failures]
        channels = [NodeChannel(store, each, node, 2, 30.0) for node, each in enumerate(rounds)]
        channels[1].raise_alarm(kind)
        for channel in channels:
            channel.count_failure()
        for channel in channels:
            channel.close()
