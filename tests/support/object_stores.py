"""Loopback servers of Amazon S3 and of Google Cloud Storage (moto, gcp-storage-emulator) in processes of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agent_meeting import free_port

BUCKET = "corpus"
# `python -m` has no module of the emulator, and its console script is not beside every interpreter.
_EMULATOR = "import sys; from gcp_storage_emulator.__main__ import main; sys.exit(main(sys.argv[1:]))"


@dataclass
class ObjectStore:
    """A store with one bucket.

    Attributes:
        scheme: Of its URLs.
        address: Of its server.
        environment: What a client finds it by.
    """

    scheme: str
    address: str
    environment: dict[str, str] = field(default_factory=dict)

    def put(self, name: str, content: bytes) -> None:
        """Write an object of the bucket."""
        if self.scheme == "s3":
            _request("PUT", f"{self.address}/{BUCKET}/{name}", content)
        else:
            path = f"upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={name}"
            _request("POST", f"{self.address}/{path}", content)


@contextlib.contextmanager
def running_store(scheme: str, log: Path) -> Iterator[ObjectStore]:
    """Run the server of a kind of store, with an empty bucket."""
    port = free_port()
    store = ObjectStore(scheme, f"http://127.0.0.1:{port}")
    if scheme == "s3":
        command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)]
        store.environment = {
            "AWS_ENDPOINT_URL": store.address,
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    else:
        arguments = ["start", "--host=127.0.0.1", f"--port={port}", "--in-memory", f"--default-bucket={BUCKET}"]
        command = [sys.executable, "-c", _EMULATOR, *arguments]
        store.environment = {"STORAGE_EMULATOR_HOST": store.address}
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "LC_ALL": "C"})
    try:
        _wait_for_answer(store.address, server, log)
        if scheme == "s3":
            _request("PUT", f"{store.address}/{BUCKET}", b"")
        yield store
    finally:
        server.kill()
        server.wait()


def _wait_for_answer(address: str, server: subprocess.Popen, log: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            _request("GET", address, None)
        except urllib.error.HTTPError:
            return
        except OSError:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        else:
            return


def _request(method: str, url: str, content: bytes | None) -> bytes:
    request = urllib.request.Request(url, content, {"Content-Type": "application/octet-stream"}, method=method)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read()
