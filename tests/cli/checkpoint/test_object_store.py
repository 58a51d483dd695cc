"""`instep checkpoint ls|show|verify` on a real object store."""

from __future__ import annotations

from instep.checkpoint import CheckpointStore
from tests.cli.checkpoint.conftest import Command, writes
from tests.helpers.object_store import Bucket


def test_checkpoint_commands_read_an_object_store(bucket: Bucket, instep: Command) -> None:
    store = CheckpointStore(f"{bucket.url}/runs/mine")
    store.own("abc")
    for step in (10, 20):
        store.save(step, writes(float(step), step), info={"kind": "full", "epoch": 1}, run_id="abc")
    for where in (bucket.url, str(store.root)):
        answer = instep("ls", where)
        assert answer.code == 0
        assert [word in answer.out for word in ("held by run abc", "step-00000010-1", "step-00000020-1")] == [True] * 3
    assert store.lease is not None
    store.lease.release()
    assert "held" not in instep("ls", bucket.url).out
    shown = instep("show", store.root, "--json").json
    assert shown["path"] == f"{store.root}/step-00000020-1", "the newest"
    assert shown["tensors"]["model.safetensors"]["linear.weight"]["shape"] == [2, 3]
    assert instep("verify", bucket.url).out.endswith("2 verified, 0 damaged\n")

    key = "runs/mine/step-00000020-1/model.safetensors"
    data = bucket.get(key)
    bucket.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    answer = instep("verify", bucket.url, "--json")
    assert answer.code == 1
    [damaged] = [result for result in answer.json["checkpoints"] if not result["ok"]]
    assert damaged["path"] == f"{store.root}/step-00000020-1"
    assert damaged["problems"][0].startswith("model.safetensors differs")
    bucket.put(key, data[:-9])
    answer = instep("ls", bucket.url)
    assert answer.code == 1
    assert "broken: model.safetensors" in answer.out
    bucket.client.delete_object(Bucket=bucket.name, Key="runs/mine/step-00000020-1/manifest.json")
    assert instep("verify", bucket.url).out.endswith("1 verified, 0 damaged\n"), "without a manifest it is none"
