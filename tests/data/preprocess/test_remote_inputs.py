"""Inputs by URL give the bytes of the same files on disk; failures are tried again, and end with URL, cause and fix."""

import bz2
import gzip
import json
import sys
import tomllib
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
from file_server import FileServer
from paths import ROOT
from token_files import sentences, small_tokenizer, write_jsonl

from megalaunch.data import remote_store
from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.preprocess import Result, preprocess
from megalaunch.data.preprocess.settings import Settings
from megalaunch.data.preprocess.shards.write import merge_shards, write_shard
from megalaunch.data.preprocess.tokenizer_loader import TokenizerLoader
from megalaunch.data.remote_reader import RemoteReader

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
TEXTS = sentences(200)


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Settings:
    tokenizer = small_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
    return Settings(tokenizer, append_eod=True, chunk_bytes=700, checkpoint_seconds=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A file of every format, which all hold the same texts but for the text files."""
    made = tmp_path_factory.mktemp("in")
    plain = write_jsonl(made / "a.jsonl", TEXTS)
    (made / "b.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (made / "c.jsonl.bz2").write_bytes(bz2.compress(plain.read_bytes()))
    for number in range(3):
        (made / f"t{number}.txt").write_text("\n".join(TEXTS[number::3]))
    (made / "t3.txt.gz").write_bytes(gzip.compress(b"the old\n\nsea\n"))
    try:
        import pyarrow as arrow
        import pyarrow.feather as feather
        import pyarrow.parquet as parquet
        import zstandard
    except ImportError:
        return made
    (made / "d.jsonl.zst").write_bytes(zstandard.compress(plain.read_bytes()))
    table = arrow.table({"id": list(range(len(TEXTS))), "text": TEXTS})
    parquet.write_table(table, made / "e.parquet", row_group_size=70)
    feather.write_feather(table, str(made / "f.arrow"), compression="uncompressed")
    with arrow.OSFile(str(made / "g.arrow"), "wb") as file, arrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return made


@pytest.fixture
def memory(folder):
    """The same files in fsspec's memory."""
    system = fsspec.filesystem("memory")
    for path in folder.iterdir():
        system.pipe(f"/corpus/{path.name}", path.read_bytes())
    yield system
    system.rm("/corpus", recursive=True)


@pytest.fixture
def server(folder, monkeypatch):
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    monkeypatch.setattr(remote_store, "_FIRST_WAIT", 0.01)
    made = FileServer()
    made.files = {path.name: path.read_bytes() for path in folder.iterdir()}
    yield made
    made.close()


def run(sources: list[str], prefix: Path, settings: Settings) -> Result:
    return preprocess(sources, prefix, settings, lambda counts: None)


def written(result: Result) -> list[bytes]:
    return [Path(f"{prefix}{end}").read_bytes() for prefix in result.prefixes for end in (".bin", ".idx")]


def read_inputs(result: Result) -> list[dict]:
    return json.loads(result.report.read_text())["inputs"]


def test_every_format_gives_the_bytes_of_the_files_on_disk(tmp_path, settings, folder, memory):
    local = run([str(folder / "*")], tmp_path / "local", settings)
    remote = run(["memory://corpus/*"], tmp_path / "remote", settings)
    assert written(remote) == written(local)
    assert remote.counts.bytes_read == local.counts.bytes_read
    known = {Path(entry["file"]).name: entry["sha256"] for entry in read_inputs(local)}
    assert {entry["file"].rpartition("/")[2]: entry["sha256"] for entry in read_inputs(remote)} == known
    assert all(entry["file"].startswith("memory://") for entry in read_inputs(remote))
    as_url = run([(folder / "a.jsonl").as_uri()], tmp_path / "url", settings)
    assert written(as_url) == written(run([str(folder / "a.jsonl")], tmp_path / "path", settings))


def test_a_folder_is_read_as_a_dataset(tmp_path, settings, folder, memory):
    memory.pipe("/corpus/set/README.md", b"# about")
    memory.pipe("/corpus/set/train/x.jsonl", (folder / "a.jsonl").read_bytes())
    memory.pipe("/corpus/set/test/x.jsonl", b"{}")
    notes: list[str] = []
    result = preprocess(["memory://corpus/set"], tmp_path / "set", settings, lambda counts: None, notes.append)
    assert written(result) == written(run([str(folder / "a.jsonl")], tmp_path / "path", settings))
    assert "left out split test (memory:///corpus/set/test/x.jsonl)" in " ".join(notes)


def test_shards_of_urls_give_the_bytes_of_one_run(tmp_path, settings, folder, server):
    sources = [f"{server.address}/{name}" for name in ("a.jsonl", "b.jsonl.gz", "t0.txt", "t1.txt")]
    for number in (2, 0, 1):
        with TokenizerLoader.start(settings.tokenizer) as loader:
            write_shard(sources, tmp_path / "p", settings, (number, 3), lambda counts: None, lambda text: None, loader)
    merged = merge_shards(sources, tmp_path / "p", settings, 3)
    alone = run([str(folder / source.rpartition("/")[2]) for source in sources], tmp_path / "alone", settings)
    assert written(merged) == written(alone)
    etag = fsspec.filesystem("http").info(sources[0])["ETag"].strip('"')
    size = (folder / "a.jsonl").stat().st_size
    assert read_inputs(merged)[0] == {"file": sources[0], "bytes": size, "sha256": "", "etag": etag}


def test_failed_requests_are_tried_again(tmp_path, settings, folder, server):
    server.failures = [503, 0]
    result = run([f"{server.address}/a.jsonl"], tmp_path / "p", settings)
    assert not server.failures
    assert written(result) == written(run([str(folder / "a.jsonl")], tmp_path / "local", settings))
    server.failures, server.requests = [500] * 100, 0
    with pytest.raises(
        DataError, match=r"a\.jsonl: cannot read it after 4 attempts \(ClientResponseError: 500.*network"
    ):
        run([f"{server.address}/a.jsonl"], tmp_path / "q", settings)
    assert server.requests < 12


def test_a_short_answer_is_asked_for_again(monkeypatch, memory):
    """Not every store's client compares the length with that which was asked for."""
    monkeypatch.setattr(remote_store, "_FIRST_WAIT", 0.01)
    whole, asked = memory.cat("/corpus/a.jsonl"), []

    class Short(BytesIO):
        def read(self, size: int = -1) -> bytes:
            asked.append(size)
            return super().read(size if len(asked) > 1 else size - 1)

    monkeypatch.setattr(memory, "open", lambda path, mode, cache_type: Short(whole))
    assert RemoteReader("memory://corpus/a.jsonl", len(whole), memory, "/corpus/a.jsonl").readall() == whole
    assert len(asked) == 2


def test_an_input_that_is_replaced_while_it_is_read(tmp_path, settings, server):
    def overwrite(counts: object) -> None:
        server.files["a.jsonl"] = server.files["a.jsonl"].replace(b"sea", b"see")

    with pytest.raises(DataError, match=r"a\.jsonl: it changed while it was read \(its version differs"):
        preprocess([f"{server.address}/a.jsonl"], tmp_path / "p", settings, overwrite)


def test_a_server_without_ranges(tmp_path, settings, server):
    server.ranges = False
    server.files["long.jsonl"] = server.files["a.jsonl"] * 400
    assert run([f"{server.address}/a.jsonl"], tmp_path / "p", settings).counts.written == len(TEXTS)
    with pytest.raises(DataError, match=r"long\.jsonl: the server sends a file only as a whole .*Download it"):
        run([f"{server.address}/long.jsonl"], tmp_path / "q", replace(settings, chunk_bytes=1 << 22))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("memory://corpus/none.jsonl", r"memory://corpus/none\.jsonl: there is no such file or folder\. Correct"),
        ("memory://corpus/*.none", r"memory://corpus/\*\.none: no file matches this glob\. Correct"),
        ("nostore://a/b", "nostore:// is not a kind of store"),
        ("simplecache::memory://corpus/a.jsonl", "chained URLs are not read"),
        ("s3://AKIAKEY:verysecret@bucket/x.jsonl", r"s3://\*\*\*@bucket/x\.jsonl: the URL holds a credential"),
        ("https://verysecret@host/x.jsonl?a=b", r"https://\*\*\*@host/x\.jsonl: the URL holds a credential"),
        ("https://host/x.jsonl?X-Amz-Signature=verysecret", r"https://host/x\.jsonl\?\*\*\*: the URL is signed"),
        ("simplecache::s3://k:verysecret@bucket/x", "chained URLs are not read"),
    ],
)
def test_what_is_refused(tmp_path, settings, memory, url, said):
    with pytest.raises(DataError, match=said) as raised:
        run([url], tmp_path / "p", settings)
    assert "verysecret" not in str(raised.value)


def test_a_missing_file_of_a_server(tmp_path, settings, server):
    with pytest.raises(DataError, match="there is no such file or folder"):
        run([f"{server.address}/none.jsonl"], tmp_path / "p", settings)
    assert server.requests < 4  # not tried again


def test_fsspec_is_named_with_its_extra(tmp_path, settings, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(DataError, match=r"needs the package fsspec\. pip install 'megalaunch\[data\]' brings it"):
        run(["s3://b/x.jsonl"], tmp_path / "p", settings)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(requirement.startswith("fsspec") for requirement in extras["data"])


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_a_missing_package_is_named(tmp_path, settings, monkeypatch, scheme, package):
    monkeypatch.setitem(sys.modules, package, None)
    said = rf"{scheme}://b/x\.jsonl: reading it needs the package {package}\. pip install {package} brings it"
    with pytest.raises(DataError, match=said):
        run([f"{scheme}://b/x.jsonl"], tmp_path / "p", settings)
