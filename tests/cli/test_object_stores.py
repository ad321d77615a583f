"""`megalaunch preprocess` of s3:// and gs:// URLs by the stores' own clients writes the bytes of the files on disk."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest
from object_stores import BUCKET, ObjectStore, running_store
from token_files import sentences, small_tokenizer, write_jsonl
from warm_process import COLD_MEGALAUNCH

from megalaunch.rundir.outcome import ExitCode

PACKAGES = {"s3": ("s3fs", "moto"), "gs": ("gcsfs", "gcp_storage_emulator")}
"""The client of a store and its server; both are in the extra `parity`."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=PACKAGES)
def store(request, tmp_path_factory):
    for package in PACKAGES[request.param]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} (the extra `parity`) is not installed")
    with running_store(request.param, tmp_path_factory.mktemp("server") / "server.log") as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("files")
    texts = sentences(600)
    for number in range(3):
        write_jsonl(made / f"part{number}.jsonl", texts[number::3])
    small_tokenizer(made / "tokenizer.json")
    return made


def run(folder: Path, store: ObjectStore, *arguments: str) -> tuple[int, str]:
    command = [
        *COLD_MEGALAUNCH,
        "preprocess",
        *arguments,
        "--tokenizer",
        str(folder / "tokenizer.json"),
        "--append-eod",
    ]
    environment = {**os.environ, **store.environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def written(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}_text_document.{end}").read_bytes() for end in ("bin", "idx")]


def test_a_glob_gives_the_bytes_of_the_files_on_disk(store, folder, tmp_path):
    for path in folder.glob("part*.jsonl"):
        store.put(f"web/{path.name}", path.read_bytes())
    glob = f"{store.scheme}://{BUCKET}/web/part*.jsonl"
    for inputs, prefix in ((glob, "remote"), (str(folder / "part*.jsonl"), "local")):
        code, output = run(folder, store, inputs, "--output-prefix", str(tmp_path / prefix))
        assert code == 0, output
    assert written(tmp_path / "remote") == written(tmp_path / "local")
    code, output = run(folder, store, glob, "--shards", "2", "--output-prefix", str(tmp_path / "shards"))
    assert code == 0, output
    assert written(tmp_path / "shards") == written(tmp_path / "local")
    inputs = json.loads((tmp_path / "remote_text_document.json").read_text())["inputs"]
    assert [entry["file"] for entry in inputs] == [f"{store.scheme}://{BUCKET}/web/part{n}.jsonl" for n in range(3)]
    assert all(entry["etag"] for entry in inputs)


def test_a_missing_object_and_a_missing_bucket_are_named(store, folder, tmp_path):
    for place in (f"{BUCKET}/none.jsonl", "nobucket/none.jsonl"):
        url = f"{store.scheme}://{place}"
        code, output = run(folder, store, url, "--output-prefix", str(tmp_path / "x"))
        assert code == ExitCode.DATA, output
        assert f"{url}: there is no such file or folder" in " ".join(output.split())
