"""A real object store on loopback, served by moto in a process of its own, which ends with the tests."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from tests.helpers.spawn import HANG_S

_SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel("ERROR")
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
_NEEDED = {
    "upath": "universal_pathlib",
    "s3fs": "s3fs",
    "moto": "moto[s3]",
    "flask": "flask",
    "flask_cors": "flask-cors",
}


def need_packages() -> None:
    """Skip the test, and say what to install, where a package is missing."""
    for module, package in _NEEDED.items():
        pytest.importorskip(module, reason=f"pip install '{package}'")


class Bucket:
    """A bucket of its own for a test.

    Attributes:
        url: such as "s3://b-0123".
        client: boto3's, to look and to damage without any code of ours or of fsspec's.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self.name = f"b-{uuid.uuid4().hex[:12]}"
        self.url = f"s3://{self.name}"
        client.create_bucket(Bucket=self.name)

    def keys(self) -> list[str]:
        """All objects."""
        return [entry["Key"] for entry in self.client.list_objects_v2(Bucket=self.name).get("Contents", [])]

    def get(self, key: str) -> bytes:
        return self.client.get_object(Bucket=self.name, Key=key)["Body"].read()

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=data)

    def unfinished(self) -> list[str]:
        """Uploads in parts that were neither completed nor given up: they cost money, and no listing shows them."""
        return [entry["Key"] for entry in self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])]


@contextmanager
def serve() -> Iterator[dict[str, str]]:
    """Run the server; the environment in which every S3 library, in child processes too, talks to it."""
    need_packages()
    server = subprocess.Popen([sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        port = server.stdout.readline().strip()
        assert port, "the server did not start"
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    finally:
        server.terminate()  # processes that a test forked may hold its stdin open
        server.wait(timeout=HANG_S)
        server.stdin.close()
        server.stdout.close()


@contextmanager
def bucket(environment: dict[str, str]) -> Iterator[Bucket]:
    """A new bucket, and the environment that finds it."""
    import boto3  # late: comes with moto

    with mock.patch.dict("os.environ", environment):
        client = boto3.client("s3")
        yield Bucket(client)
        client.close()
