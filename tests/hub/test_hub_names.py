"""`hf://org/name` for models, tokenizers and data, with the real client against a loopback server."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_server import HubServer
from made_models import write_random_folder
from training import make_corpus, train_tiny

from megalaunch.data.tokenizer.tokenizer import train_tokenizer
from megalaunch.hub.name import HubError, HubName, is_same_source, parse_hub_name
from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema.spec_file import read_spec

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secretsecretsecret"


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("hf://org/name", "model", HubName("model", "org/name")),
        ("hf:/org/name", "model", HubName("model", "org/name")),  # as pathlib writes it
        ("hf://org/name@v1.0/sub/tokenizer.json", "model", HubName("model", "org/name", "v1.0", "sub/tokenizer.json")),
        ("hf://org/name", "dataset", HubName("dataset", "org/name")),
        ("hf://datasets/org/n.a-me@refs/convert/parquet/data/*.parquet", "model",
         HubName("dataset", "org/n.a-me", "refs/convert/parquet", "data/*.parquet")),
        (f"hf://org/name@{COMMIT}", "model", HubName("model", "org/name", COMMIT)),
    ],
)  # fmt: skip
def test_a_name_is_parsed_and_written_again(text, kind, name):
    assert parse_hub_name(text, kind) == name
    assert parse_hub_name(str(name), kind) == name


@pytest.mark.parametrize("text", ["hf://name", "hf://org/name/../x", "hf://org/name@", "hf://", "hf://user:pw@host/a"])
def test_another_form_is_refused(text):
    with pytest.raises(HubError, match="write hf://ORG/NAME"):
        parse_hub_name(text, "model")


def test_a_name_without_a_revision_stands_for_the_pinned_one():
    pinned = parse_hub_name(f"hf://org/name@{COMMIT}/a", "model")
    assert is_same_source(parse_hub_name("hf://org/name/a", "model"), pinned)
    assert is_same_source(pinned, pinned)
    for other in ("hf://org/name/b", "hf://org/name@v1/a", "hf://org/other/a", "hf://datasets/org/name/a"):
        assert not is_same_source(parse_hub_name(other, "model"), pinned)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Hugging Face folder of a small Llama with a tokenizer."""
    made = tmp_path_factory.mktemp("hf") / "small"
    write_random_folder(made, torch.float32, num_layers=1, hidden_size=32, ffn_hidden_size=48, vocab_size=300)
    train_tokenizer(["many small tests count the words until they are done. " * 20], 300, made / "tokenizer.json")
    return made


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    server = HubServer(TOKEN)
    server.repository("org/small").commit({path.name: path.read_bytes() for path in folder.iterdir()})
    texts = {f"train/{path.name}": path.read_bytes() for path in make_corpus(tmp_path / "texts").iterdir()}
    server.repository("datasets/org/texts").commit({"README.md": b"---\nlicense: mit\n---\n", **texts})
    for name, value in {"HF_ENDPOINT": server.address, "HF_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.close()


def overrides(folder: Path, *more: str) -> list[str]:
    names = ("model=hf://org/small", "tokenizer.path=hf://org/small", "checkpoint.load_pretrained=hf://org/small")
    return [*names, "data.corpus=hf://datasets/org/texts/train", "train.sample_prompt=null", *more]


@pytest.mark.slow
def test_a_run_pins_what_it_names_and_a_resume_uses_the_same_commits_without_a_network(hub, tmp_path):
    model, texts = hub.repository("org/small"), hub.repository("datasets/org/texts")
    first, data = model.refs["main"], texts.refs["main"]
    typed = overrides(tmp_path, "train.steps=4", "train.exit_at_step=2", "data.num_samples=64")
    code, out, err = train_tiny(tmp_path, *typed, HF_TOKEN=TOKEN)
    assert code == 0, out + err
    assert f"checkpoint.load_pretrained=hf://org/small@{first}" in out
    directory = RunDirectory(tmp_path / "run")
    spec = read_spec(directory.spec)
    assert spec.run.hub_revisions == (
        f"model=hf://org/small@{first}",
        f"tokenizer.path=hf://org/small@{first}",
        f"checkpoint.load_pretrained=hf://org/small@{first}",
        f"data.corpus=hf://datasets/org/texts@{data}/train",
    )
    assert (spec.model.name, spec.data.corpus) == ("small", f"hf://datasets/org/texts@{data}/train")
    assert spec.checkpoint.load_pretrained.endswith(f"models--org--small/snapshots/{first}")
    assert hub.tokens == {TOKEN}
    written = [path for path in directory.root.rglob("*") if path.is_file()]
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]
    assert TOKEN not in out + err

    # The main branches move: the run does not.
    model.commit({**model.commits[first], "config.json": b'{"model_type": "other"}'})
    texts.commit({"train/other.txt": b"something else " * 400})
    hub.requests.clear()
    code, out, err = train_tiny(
        tmp_path, *[one for one in typed if "exit_at" not in one], HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9"
    )
    assert code == 0, out + err
    assert not hub.requests
    assert read_spec(directory.spec).run.hub_revisions == spec.run.hub_revisions
    assert [line["step"] for line in read_lines(directory.metrics) if "loss" in line] == [1, 2, 3, 4]


CALLS = """
import json, sys
from typer.testing import CliRunner
from megalaunch.cli.app import app
for arguments in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, arguments)
    print(json.dumps([done.exit_code, " ".join(done.output.split())]))
"""


def invoke(*calls: str) -> list[tuple[int, str]]:
    """Call command lines in one other process, as the client reads its settings once; (exit code, output) of each."""
    command = [sys.executable, "-c", CALLS, json.dumps([shlex.split(call) for call in calls])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_commands_take_names_and_read_the_cache_without_a_network(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = "hf://datasets/org/texts/train/*_00.txt"
    answers = invoke(
        "generate hf://org/small --prompt many --max-new-tokens 4",
        "convert import hf://org/small --output ckpt",
        f"preprocess '{texts}' --output-prefix tokens --tokenizer hf://org/small --workers 1",
    )
    assert [code for code, _ in answers] == [0, 0, 0], answers
    assert "wrote ckpt" in answers[1][1]
    assert "1 document," in answers[2][1]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    answers = invoke(
        "tokenizer inspect hf://org/small",
        "validate-config recipe=tiny model=hf://org/small --explain model.hidden_size",
    )
    assert [code for code, _ in answers] == [0, 0], answers
    assert f"hf://org/small@{hub.repository('org/small').refs['main']}/config.json:1:" in answers[1][1]
    assert not hub.requests


REFUSED = (
    ("hf://org/missing", "there is no model repository org/missing", "set HF_TOKEN, or run `hf auth login`"),
    ("hf://org/private", "or it is private", "set HF_TOKEN"),
    ("hf://org/gated", "hf://org/gated is gated", "accept its terms at http://127.0.0.1"),
    ("hf://org/small@v9", "org/small has no revision v9", "a branch, a tag or a full commit hash"),
    ("hf://org/small/sub", "the repository has no such file or folder", "look it up at"),
    ("hf://small", "is not a name on the Hugging Face Hub", "write hf://ORG/NAME"),
)


@pytest.mark.slow
def test_what_cannot_be_had_is_an_error_with_its_fix(hub, monkeypatch):
    gated, private = hub.repository("org/gated"), hub.repository("org/private")
    gated.commit({"config.json": b"{}"})
    private.commit(hub.repository("org/small").commits[hub.repository("org/small").refs["main"]])
    gated.access, private.access = "gated", "private"
    *answers, (code, composed), (run_code, run) = invoke(
        *(f"tokenizer inspect {name}" for name, _, _ in REFUSED),
        "validate-config recipe=tiny model=hf://org/missing",
        "train --dry-run recipe=tiny tokenizer.path=hf://org/missing data.corpus=hf://org/none",
    )
    for (name, cause, fix), (one, text) in zip(REFUSED, answers, strict=True):
        assert one == 3, name
        assert cause in text, text
        assert fix in text.partition("fix: ")[2], text
    assert code == 2
    assert "there is no model repository org/missing" in composed
    assert run_code == 2  # all names of a run at once
    assert "tokenizer.path: there is no model repository org/missing" in run
    assert "data.corpus: there is no dataset repository org/none" in run

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert invoke("tokenizer inspect hf://org/private")[0][0] == 0
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    [(_, text)] = invoke("tokenizer inspect hf://org/small")
    assert "in the cache" in text
    assert "HF_HUB_OFFLINE forbids downloads" in text
    assert "set HF_HOME to the cache that has it" in text
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://user:password@127.0.0.1:9")
    [(_, text)] = invoke("tokenizer inspect hf://org/small")
    assert "http://127.0.0.1:9 cannot be reached" in text
    assert "run `hf download org/small` where there is a network" in text
    assert "password" not in text


def test_a_missing_client_is_named_with_its_extra(monkeypatch):
    from megalaunch.hub import snapshot

    monkeypatch.setattr(snapshot, "find_spec", lambda name: None)
    with pytest.raises(HubError, match=r"pip install 'megalaunch\[hub\]'"):
        snapshot.fetch(parse_hub_name("hf://org/unseen", "model"), "config")
