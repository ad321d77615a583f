"""`megalaunch serve`: a server in a process of its own, clients that others wrote, and every refusal."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest
from harness_tasks import write_model, write_tasks
from model_server import TOKEN, running_server
from tiny_run import make_run
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.cli.text import serve as module
from megalaunch.engine import api
from megalaunch.rundir.paths import RunDirectory


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunDirectory:
    return make_run(tmp_path_factory.mktemp("runs") / "tiny", (10,))


def call(*arguments: object):
    return CliRunner().invoke(app, ["serve", *(str(argument) for argument in arguments)])


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_model_is_served_until_a_signal(run, tmp_path, ending):
    environment = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "config"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "megalaunch", "serve", str(run.root), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            lines = [process.stdout.readline() for _ in range(4)]
            found = re.fullmatch(r"tiny is served at (http://127\.0\.0\.1:(\d+)/v1)\n", lines[0])
            assert found, (lines, process.poll())
            url, port = found[1], int(found[2])
            token_file = tmp_path / "config" / "megalaunch" / "serve_token"
            assert lines[1:] == [
                f"clients: OPENAI_BASE_URL={url} OPENAI_API_KEY=$(cat {token_file})\n",
                f"from another machine: ssh -L {port}:127.0.0.1:{port} THIS_MACHINE, then the same address there\n",
                "Ctrl-C ends the server\n",
            ]
            token = token_file.read_text().strip()
            assert token not in "".join(lines)
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            body = json.dumps({"prompt": "the cat", "max_tokens": 3})
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", body, headers)
            response = connection.getresponse()
            assert response.status == 200
            assert json.loads(response.read())["model"] == "tiny"
            process.send_signal(ending)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out) == (0, "the server has ended\n")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--host", "example.org"], "--host example.org is no IP address: give one, such as 127.0.0.1"),
        (["--host", "0.0.0.0"], "other machines would reach the model at 0.0.0.0, over a connection that is not enc"),
        (
            ["--host", "0.0.0.0", "--allow-remote", "--no-token"],
            "--no-token would let everybody who reaches 0.0.0.0 use the model: leave it out",
        ),
        (["--no-token", "--token-file", "x"], "--no-token and --token-file exclude each other: leave one out"),
    ],
)
def test_who_may_reach_the_server_is_settled_first(options, reason):
    result = call("no-such-run", *options)
    assert result.exit_code == 2
    assert reason in " ".join(result.stderr.split())


def test_a_source_that_is_no_model_is_refused(tmp_path):
    result = call(tmp_path, "--no-token")
    assert result.exit_code == 2
    assert "or a Hugging Face folder" in result.stderr


def test_a_port_in_use_is_named_before_the_weights_are_loaded(run, monkeypatch):
    monkeypatch.setattr(api, "load_weights", lambda source: pytest.fail("the weights are loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = call(run.root, "--no-token", "--port", port)
    assert result.exit_code == 2
    assert result.stderr.strip() == (
        f"error: 127.0.0.1 port {port} cannot be listened on (Address already in use): give another --port or --host"
    )


def test_a_token_that_cannot_be_kept_names_the_option(run, tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "token"
    result = call(run.root, "--token-file", path)
    assert result.exit_code == 2
    assert result.stderr.strip() == (
        f"error: the token cannot be kept in {path} (Not a directory): name another file with --token-file"
    )


def test_a_token_that_others_can_change_is_refused_before_the_weights_are_loaded(run, tmp_path, monkeypatch):
    monkeypatch.setattr(api, "load_weights", lambda source: pytest.fail("the weights are loaded"))
    path = tmp_path / "token"
    path.write_text("mine\n")
    path.chmod(0o666)
    result = call(run.root, "--token-file", path)
    assert result.exit_code == 2
    assert result.stderr.strip() == (
        f"error: {path} can be changed by other users (mode 666): chmod 600 {path}, or name another file with "
        "--token-file"
    )


@pytest.mark.parametrize("package", ["torch", "starlette", "uvicorn"])
def test_a_missing_package_is_named_with_its_extra(run, monkeypatch, package):
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == package else object())
    result = call(run.root)
    assert result.exit_code == 2
    assert f"serve needs {package}, which is not installed" in result.stderr
    assert "megalaunch[serve]" in result.stderr


def test_the_settings_reach_the_server(run, tmp_path, monkeypatch):
    served = []
    monkeypatch.setattr(api, "serve", lambda model, listener, settings: served.append((model, listener, settings)))
    (tmp_path / "token").write_text("mine\n")
    (tmp_path / "token").chmod(0o600)
    options = ("--model-name", "other", "--token-file", tmp_path / "token", "--max-num-seqs", 3, "--max-queue", 5)
    result = call(run.root, "--port", 0, *options, "--no-bos", "--eager")
    assert result.exit_code == 0, result.output
    [(model, _, settings)] = served
    assert settings == api.ServerSettings("other", "mine", 3, 5, True)
    assert not model.add_special_tokens
    assert "other is served at http://127.0.0.1:" in result.output
    assert "OPENAI_API_KEY=$(cat " in result.output
    assert "mine" not in result.output
    call(run.root, "--port", 0, "--no-token", "--host", "::1")
    assert served[1][2] == api.ServerSettings("tiny", None)
    assert served[1][0].add_special_tokens


@pytest.mark.slow
def test_openais_own_client_reads_the_answers(run):
    openai = pytest.importorskip("openai")
    with running_server(api.open_model(run.root)) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        client = openai.OpenAI(base_url=url, api_key=TOKEN, max_retries=0)
        assert [model.id for model in client.models.list()] == ["tiny"]
        asked = {"model": "tiny", "prompt": "the cat", "max_tokens": 8, "seed": 1}
        whole = client.completions.create(**asked, logprobs=2)
        pieces = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        assert "".join(one.choices[0].text for one in pieces[:-1]) == whole.choices[0].text
        assert pieces[-1].usage == whole.usage
        assert len(whole.choices[0].logprobs.tokens) == whole.usage.completion_tokens
        with pytest.raises(openai.BadRequestError, match="must be a number from 0 to 100") as refused:
            client.completions.create(model="tiny", prompt="x", temperature=-1)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="gpt-4", prompt="x")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()


@pytest.mark.slow
def test_lm_eval_scores_a_model_through_the_server_as_in_this_process(tmp_path, monkeypatch):
    """Multiple choice and whole texts by log-probabilities of echoed tokens, and written text with stop strings."""
    evaluator = pytest.importorskip("lm_eval.evaluator")
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    write_model(tmp_path / "model", begins=False)
    tasks = write_tasks(tmp_path / "tasks", longest=6)  # lm-eval shortens longer ones in two ways
    model = api.open_model(tmp_path / "model")
    scores = api.task_scores(model, tasks, tmp_path / "tasks")
    monkeypatch.setenv("OPENAI_API_KEY", TOKEN)
    with running_server(model, name="model") as server:
        remote = LocalCompletionsAPI(
            base_url=f"http://127.0.0.1:{server.port}/v1/completions",
            model="model",
            tokenizer=str(tmp_path / "model"),
            tokenizer_backend="huggingface",
            max_length=48,
        )
        manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
        found = evaluator.simple_evaluate(remote, tasks=tasks, task_manager=manager, bootstrap_iters=0)["results"]
    assert {score.task for score in scores} == set(tasks)
    for score in scores:
        assert found[score.task][f"{score.metric},{score.filter}"] == pytest.approx(score.value, abs=1e-4), score
