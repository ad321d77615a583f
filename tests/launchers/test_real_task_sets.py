"""Shards of a `preprocess` over real Slurm, ssh and Ray, and in pods: the bytes of one process, also after failures."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster_runs import call, losses_of, parent_of, processes, shown
from fake_kubectl import FakeKubectl
from launching import events_of, steps_of, wait_until
from mini_kubelet import running_pods
from mini_slurm import mini_slurm
from mini_ssh import mini_ssh
from token_files import sentences, small_tokenizer, write_jsonl
from training import make_corpus
from warm_process import COLD_MEGALAUNCH

from megalaunch.launchers.record import read_record
from megalaunch.process import descendants, kill_all
from megalaunch.rundir.paths import RunDirectory

pytestmark = [pytest.mark.slow, pytest.mark.timed]
_SHARDS = ("--shards", "4")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder with a text of 20 MB, a tokenizer, and the token files of one process."""
    folder = tmp_path_factory.mktemp("corpus of it's 100%")
    small_tokenizer(folder / "tokenizer.json")
    write_jsonl(folder / "in.jsonl", [" ".join(sentences(100))] * 4_000)
    code, output = call(folder, *preprocess("alone"))
    assert code == 0, output
    return folder


@pytest.fixture(scope="module")
def slurm_variables(tmp_path_factory):
    with mini_slurm(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


@pytest.fixture
def slurm(slurm_variables, monkeypatch):
    for name, value in slurm_variables.items():
        monkeypatch.setenv(name, value)
    return ("launcher=slurm", "launcher.slurm.exclusive=false", "launcher.slurm.cpus_per_task=1")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with mini_ssh(tmp_path_factory.mktemp("ssh")) as overrides:
        yield [word for word in overrides if word.startswith("launcher")]


@pytest.fixture(scope="module")
def ray_cluster():
    pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    size = {"num_cpus": 1, "object_store_memory": 80_000_000}
    made = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    try:
        made.add_node(**size)
        yield ("launcher=ray", f"launcher.ray.address={made.address}")
    finally:
        made.shutdown()


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    fake = FakeKubectl(tmp_path / "cluster")
    monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    return fake


_PODS = ("launcher=kubernetes", "launcher.kubernetes.image=none", f"launcher.python={sys.executable}")


def preprocess(prefix):
    return ("preprocess", "in.jsonl", "--tokenizer", "tokenizer.json", "--workers", "1", "--output-prefix", prefix)


def token_bytes(folder, prefix):
    return [(folder / f"{prefix}_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx")]


def stop_shard(folder, prefix, number):
    """Stop the process of a shard as soon as it is there, so that a test meets it at work; its pid."""

    def found():
        words = f"preprocess --shard {number} ", f"--output-prefix {prefix} "
        return [pid for pid in sorted(processes("-m megalaunch", *words)) if program(pid) not in ("srun", "slurmstepd")]

    pid = wait_until(found, 60)[0]
    os.kill(pid, signal.SIGSTOP)
    return pid


def program(pid):
    """The name of a process; None: it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None


class Started:
    """A command in the background; nothing of it is left."""

    def __init__(self, folder, *arguments):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen([*COLD_MEGALAUNCH, *arguments], cwd=folder, start_new_session=True, **pipes)

    def __enter__(self):
        return self.process

    def __exit__(self, *failure):
        left = descendants(self.process.pid)
        self.process.kill()
        self.process.communicate()
        kill_all(left, 5)


def test_four_slurm_tasks_write_the_bytes_of_one_process(slurm, corpus):
    code, output = call(corpus, *preprocess("array"), *_SHARDS, *slurm)
    assert code == 0, output
    assert token_bytes(corpus, "array") == token_bytes(corpus, "alone")
    record = json.loads(RunDirectory(corpus / "array_job").job.read_text())
    assert output.startswith(f"submitted to slurm: 4 shards in job {record['id']}, then job {record['final']}; ")
    assert "4 shards complete\n" in output
    assert f"job {record['id']}: COMPLETED (final job {record['final']}, on n" in output
    assert "4 shards verified and merged\n4,000 documents, " in output
    logs = shown("logs", corpus / "array_job")
    assert [f"shard {number} of 4: 1,000 documents, " in logs for number in range(4)] == [True] * 4


def test_the_final_job_of_slurm_redoes_a_killed_shard(slurm, corpus):
    code, output = call(corpus, *preprocess("killed"), *_SHARDS, *slurm, "--detach")
    assert code == 0, output
    pid = stop_shard(corpus, "killed", 1)
    assert "RUNNING (" in shown("status", corpus / "killed_job")
    code, output = call(corpus, *preprocess("killed"), *_SHARDS, *slurm)
    assert (code, "killed_job has job " in output, " ends it" in output) == (2, True, True), output
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: "COMPLETED (final job" in shown("status", corpus / "killed_job"), 60)
    logs = shown("logs", corpus / "killed_job")
    assert "3 of 4 shards are complete already\nshard 1 of 4: 1,000 documents, " in logs
    assert token_bytes(corpus, "killed") == token_bytes(corpus, "alone")


def test_shards_that_were_stopped_in_slurm_are_continued(slurm, corpus):
    assert call(corpus, *preprocess("stopped"), *_SHARDS, *slurm, "--detach")[0] == 0
    pid = stop_shard(corpus, "stopped", 0)
    code, output = call(corpus, "stop", "stopped_job")
    os.kill(pid, signal.SIGCONT)
    assert (code, "is cancelled, and the tasks of job" in output) == (0, True), output
    wait_until(lambda: "CANCELLED" in shown("status", corpus / "stopped_job"), 60)
    wait_until(lambda: not processes("preprocess --shard", "--output-prefix stopped "), 60)
    assert not list(corpus.glob("stopped_text*"))
    code, output = call(corpus, *preprocess("stopped"), *_SHARDS, *slurm)
    assert code == 0, output
    assert token_bytes(corpus, "stopped") == token_bytes(corpus, "alone")


def test_a_bad_record_in_a_slurm_task_is_the_end_of_the_command(slurm, tmp_path):
    small_tokenizer(tmp_path / "tokenizer.json")
    path = write_jsonl(tmp_path / "in.jsonl", sentences(60))
    path.write_text(path.read_text() + "{nonsense\n")
    code, output = call(tmp_path, *preprocess("out"), "--shards", "2", *slurm)
    assert code == 3, output
    assert "in.jsonl, line 61: no JSON" in output
    assert "next    the same command keeps complete shards and continues" in output


@pytest.mark.parametrize("place", ["hosts", "ray_cluster"])
def test_a_killed_shard_is_run_again_on_hosts_and_on_a_ray_cluster(place, request, corpus):
    launcher = request.getfixturevalue(place)
    with Started(corpus, *preprocess(place), *_SHARDS, *launcher) as process:
        pid = stop_shard(corpus, place, 2)
        status = shown("status", corpus / f"{place}_job")
        os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "RUNNING (held by process" in status
    assert "killed by signal 9" in output
    assert "(4 of 4)\n" in output
    assert "4 shards verified and merged\n4,000 documents, " in output
    assert token_bytes(corpus, place) == token_bytes(corpus, "alone")


# Those on a Ray cluster before a release only: the test above holds them, and test_real_ray.py a detached run.
@pytest.mark.parametrize("place", ["hosts", pytest.param("ray_cluster", marks=pytest.mark.release)])
def test_detached_shards_continue_in_the_background(place, request, corpus):
    name, launcher = f"apart_{place}", request.getfixturevalue(place)
    words, folder = (*preprocess(name), *_SHARDS, *launcher), corpus / f"{name}_job"
    code, output = call(corpus, *words, "--detach")
    record = read_record(RunDirectory(folder).job)
    holds = f"{record.launcher}: the tasks run, held by process {record.id} here; output in {name}_job/logs"
    assert (code, output) == (0, f"{holds}\nnext: megalaunch status {name}_job, logs or stop\n")
    pid = stop_shard(corpus, name, 2)
    assert f"  state    RUNNING (held by process {record.id} on " in shown("status", folder)
    code, output = call(corpus, *words)
    assert (code, f"{folder.name} has job {record.id} already" in output) == (2, True), output
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: " has ended)" in shown("status", folder), 120)
    logs = shown("logs", folder)
    assert "killed by signal 9" in logs
    assert logs.count("4 shards verified and merged\n4,000 documents, ") == 1
    assert token_bytes(corpus, name) == token_bytes(corpus, "alone")


@pytest.mark.parametrize("place", ["hosts", pytest.param("ray_cluster", marks=pytest.mark.release)])
def test_detached_shards_are_stopped_and_the_same_command_continues(place, request, corpus):
    name = f"halted_{place}"
    words = (*preprocess(name), *_SHARDS, *request.getfixturevalue(place))
    assert call(corpus, *words, "--detach")[0] == 0
    pid = stop_shard(corpus, name, 1)
    if place == "ray_cluster":
        os.kill(pid, signal.SIGCONT)  # Ray ends tasks by SIGTERM, which a stopped process does not see
    assert call(corpus, "stop", f"{name}_job")[0] == 0
    wait_until(lambda: " has ended)" in shown("status", corpus / f"{name}_job"), 60)
    assert not processes("preprocess --shard", f"--output-prefix {name} ")
    logs = shown("logs", corpus / f"{name}_job")
    assert "interrupted; finished shards are kept; the same command continues" in logs
    code, output = call(corpus, *words)
    assert code == 0, output
    assert token_bytes(corpus, name) == token_bytes(corpus, "alone")


_RAY_DATA = """
import sys, ray
ray.init(address=sys.argv[1].partition("=")[2], log_to_driver=False)
items = [{"text": f"text {number}"} for number in range(60)]
ray.data.from_items(items).filter(lambda row: "3" not in row["text"]).repartition(3).write_parquet(sys.argv[2])
"""


def test_what_ray_data_wrote_is_an_input(ray_cluster, corpus, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    command = [sys.executable, "-c", _RAY_DATA, ray_cluster[1], str(tmp_path / "texts")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    files = sorted((tmp_path / "texts").iterdir())
    assert len(files) == 3
    texts = [text for path in files for text in parquet.read_table(path)["text"].to_pylist()]
    assert sorted(texts) == sorted(f"text {number}" for number in range(60) if "3" not in str(number))
    write_jsonl(tmp_path / "in.jsonl", texts)
    for source in ("texts", "in.jsonl"):
        words = ("--tokenizer", str(corpus / "tokenizer.json"), "--workers", "1", "--output-prefix", f"of_{source}")
        code, output = call(tmp_path, "preprocess", source, *words)
        assert code == 0, output
    assert token_bytes(tmp_path, "of_texts") == token_bytes(tmp_path, "of_in.jsonl")


def test_a_lost_host_gives_its_shard_to_another(hosts, corpus):
    with Started(corpus, *preprocess("lost"), *_SHARDS, *hosts) as process:
        pid = stop_shard(corpus, "lost", 0)
        os.kill(_agent_of(pid), signal.SIGKILL)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "task 0 is run again: node 0 (node0) was lost\n" in output
    assert token_bytes(corpus, "lost") == token_bytes(corpus, "alone")


def _agent_of(pid):
    """The process on the host, next to the connection, that started a shard."""
    agents = processes("python", "-m megalaunch.launchers.attached.remote_agent")
    while pid not in agents:
        pid = parent_of(pid)
    return pid


def test_ctrl_c_ends_the_shards_on_hosts_and_the_same_command_continues(hosts, corpus):
    with Started(corpus, *preprocess("ended"), *_SHARDS, *hosts) as process:
        stop_shard(corpus, "ended", 1)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "interrupted; finished shards are kept; the same command continues" in output
    time.sleep(0.2)
    assert not processes("preprocess --shard", "--output-prefix ended ")
    code, output = call(corpus, *preprocess("ended"), *_SHARDS, *hosts)
    assert code == 0, output
    assert token_bytes(corpus, "ended") == token_bytes(corpus, "alone")


def job_of(directory, before=None):
    """The name of the Kubernetes job of a directory, once it is there, and another one than before."""
    path = RunDirectory(directory).job
    wait_until(lambda: path.exists() and read_record(path).id != before, 60)
    return read_record(path).id


def test_a_killed_pod_is_replaced_and_four_write_the_bytes_of_one_process(cluster, corpus, tmp_path):
    with (
        Started(corpus, *preprocess("pods"), *_SHARDS, *_PODS) as process,
        running_pods(cluster, job_of(corpus / "pods_job"), tmp_path) as kubelet,
    ):
        pid = stop_shard(corpus, "pods", 2)
        status = shown("status", corpus / "pods_job")
        assert re.search(r"  state    RUNNING \(\d of 4 tasks complete, on worker-", status), status
        code, output = call(corpus, *preprocess("pods"), *_SHARDS, *_PODS)
        assert (code, "pods_job has job job/preprocess-pods-" in output) == (2, True), output
        os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=120)
        assert len(kubelet.started) == 5
    assert process.returncode == 0, output
    assert "task 2 is run again: its pod preprocess-pods-" in output
    assert "ended with exit code 137\n" in output
    assert "(4 of 4)\n" in output
    assert "4 shards verified and merged\n4,000 documents, " in output
    assert token_bytes(corpus, "pods") == token_bytes(corpus, "alone")
    assert "shard 2 of 4: 1,000 documents, " in shown("logs", corpus / "pods_job")


def test_ctrl_c_ends_the_pods_and_the_same_command_writes_the_shards_that_are_missing(cluster, corpus, tmp_path):
    words = (*preprocess("paused"), *_SHARDS, *_PODS)
    with Started(corpus, *words) as process, running_pods(cluster, job_of(corpus / "paused_job"), tmp_path):
        for number in (1, 3):
            stop_shard(corpus, "paused", number)
        wait_until(lambda: len(list((corpus / ".paused.shards").glob("*.idx"))) == 2, 60)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: not cluster.names("job"), 30)
        for pid in processes("preprocess --shard", "--output-prefix paused "):
            os.kill(pid, signal.SIGCONT)
        output, _ = process.communicate(timeout=60)
    assert (process.returncode, "the same command continues" in output) == (130, True), output
    assert not processes("preprocess --shard", "--output-prefix paused ")
    first = job_of(corpus / "paused_job")
    with (
        Started(corpus, *words) as process,
        running_pods(cluster, job_of(corpus / "paused_job", first), tmp_path) as kubelet,
    ):
        output, _ = process.communicate(timeout=120)
        assert len(kubelet.started) == 2  # of the indexes 0 and 1
    assert (process.returncode, "2 of 4 shards are complete already" in output) == (0, True), output
    assert token_bytes(corpus, "paused") == token_bytes(corpus, "alone")


def test_a_bad_record_in_a_pod_is_the_end_of_the_command(cluster, tmp_path):
    small_tokenizer(tmp_path / "tokenizer.json")
    path = write_jsonl(tmp_path / "in.jsonl", sentences(60))
    path.write_text(path.read_text() + "{nonsense\n")
    with (
        Started(tmp_path, *preprocess("out"), "--shards", "2", *_PODS) as process,
        running_pods(cluster, job_of(tmp_path / "out_job"), tmp_path) as kubelet,
    ):
        output, _ = process.communicate(timeout=60)
        assert len(kubelet.started) == 2
    assert process.returncode == 3, output
    assert "in.jsonl, line 61: no JSON" in output
    assert "shard 1 of 2 failed (exit code 3); finished shards are kept; the same command continues" in output


def test_detached_pods_write_and_merge_the_shards_alone(cluster, corpus, tmp_path):
    words, folder = (*preprocess("apart"), *_SHARDS, *_PODS), corpus / "apart_job"
    code, output = call(corpus, *words, "--detach")
    job = job_of(folder)
    submitted = (
        f"submitted to kubernetes: 4 shards in job {job}; output in apart_job/logs/pod_*.log\nnext: megalaunch status "
    )
    assert (code, output.startswith(submitted)) == (0, True), output
    assert f"  job      {job} of kubernetes, 4 tasks, submitted " in shown("status", corpus / "apart_job")
    with running_pods(cluster, job, tmp_path) as kubelet:
        pid = stop_shard(corpus, "apart", 1)
        code, output = call(corpus, *words)
        assert (code, "apart_job has job job/preprocess-apart-" in output) == (2, True), output
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: "  state    COMPLETE (" in shown("status", corpus / "apart_job"), 90)
        assert len(kubelet.started) == 5
    assert token_bytes(corpus, "apart") == token_bytes(corpus, "alone")
    logs = shown("logs", corpus / "apart_job")
    assert [f"shard {number} of 4: 1,000 documents, " in logs for number in range(4)] == [True] * 4
    assert logs.count("4 shards verified and merged\n4,000 documents, ") == 1
    assert re.search(rf"^  apart_job +kubernetes +{job} ", shown("list", corpus), re.MULTILINE)


def test_detached_pods_that_are_stopped_are_continued_by_the_same_command(cluster, corpus, tmp_path):
    words = (*preprocess("left"), *_SHARDS, *_PODS)
    assert call(corpus, *words, "--detach")[0] == 0
    first = job_of(corpus / "left_job")
    with running_pods(cluster, first, tmp_path):
        pid = stop_shard(corpus, "left", 0)
        wait_until(lambda: len(list((corpus / ".left.shards").glob("*.idx"))) == 3, 60)
        code, output = call(corpus, "stop", "left_job")
        assert (code, output) == (0, f"job {first} is deleted; its pods end\n")
        time.sleep(1)
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: not processes("preprocess --shard", "--output-prefix left "), 30)
    assert not list(corpus.glob("left_text*"))
    code, output = call(corpus, *words, "--detach")
    assert (code, "submitted to kubernetes: 1 shard in job job/preprocess-left-" in output) == (0, True), output
    with running_pods(cluster, job_of(corpus / "left_job", first), tmp_path):
        wait_until(lambda: "  state    COMPLETE (" in shown("status", corpus / "left_job"), 60)
    assert token_bytes(corpus, "left") == token_bytes(corpus, "alone")


def sweep_of_two(folder):
    """The words of a sweep of two trials of 40 steps, on a corpus of this folder."""
    corpus = make_corpus(folder / "corpus")
    length = ("train.steps=40", "schedule.decay_steps=40", "schedule.warmup_steps=1", "checkpoint.interval=5")
    on_cpu = ("platform=cpu", "precision=fp32", "parallel=dp1", "optimizer.lr=1e-3,2e-3")
    data = (f"data.corpus={corpus}", f"data.cache_directory={folder / 'cache'}")
    return ("sweep", "recipe=tiny", *data, *on_cpu, *length)


@pytest.fixture(scope="module")
def local_sweep(tmp_path_factory):
    """The directory of the sweep of two trials on this machine, as the tests below set OMP_NUM_THREADS."""
    folder = tmp_path_factory.mktemp("local_sweep")
    with pytest.MonkeyPatch.context() as here:
        here.setenv("OMP_NUM_THREADS", "1")
        code, output = call(folder, *sweep_of_two(folder), "--name", "here")
    assert code == 0, output
    return folder / "sweeps/here"


def assert_same_trials(there, here):
    """The trials of a sweep have the losses of the one on this machine."""
    for number in (1, 2):
        losses = losses_of(RunDirectory(there / f"trial_000{number}"))
        assert losses == losses_of(RunDirectory(here / f"trial_000{number}"))
        assert len(losses) == 40


def test_a_killed_trial_of_a_sweep_in_slurm_is_continued_by_the_final_job(slurm, local_sweep, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # some CPUs round otherwise with other threads, and Slurm may lend fewer
    code, output = call(tmp_path, *sweep_of_two(tmp_path), *slurm, "--name", "there", "--detach")
    assert code == 0, output
    killed = RunDirectory(tmp_path / "sweeps/there/trial_0001")
    wait_until(lambda: killed.metrics.exists() and len(steps_of(killed)) > 6, 120)
    words = "-m megalaunch sweep --trial 1 ", "--name there"
    trial = next(pid for pid in sorted(processes(*words)) if program(pid) not in ("srun", "slurmstepd"))
    os.kill(trial, signal.SIGKILL)
    wait_until(lambda: "COMPLETED (final job" in shown("status", tmp_path / "sweeps/there"), 120)
    logs = shown("logs", tmp_path / "sweeps/there")
    assert "2 of 2 trials ranked by validation_loss" in logs
    (resumed,) = events_of(killed, "resumed")
    assert resumed["step"] >= 5
    assert_same_trials(tmp_path / "sweeps/there", local_sweep)


def results_of(sweep):
    """The rows of a sweep's results.csv, without what is measured in time."""
    with (sweep / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    timed = ("tokens_per_second", "seconds", "directory")
    return [{key: value for key, value in row.items() if not key.startswith(timed)} for row in rows]


@pytest.mark.parametrize("place", ["hosts", "ray_cluster"])
def test_a_sweep_on_hosts_and_on_a_ray_cluster_has_the_results_of_the_local_one(
    place, request, local_sweep, tmp_path, monkeypatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray sets it for tasks of one CPU; ssh copies it
    launcher = (*request.getfixturevalue(place), "launcher.ssh.environment=[OMP_NUM_THREADS]")
    code, output = call(tmp_path, *sweep_of_two(tmp_path), *launcher, "--name", "there")
    assert code == 0, output
    assert "2 of 2 trials ranked by validation_loss" in output
    assert_same_trials(tmp_path / "sweeps/there", local_sweep)
    there, here = results_of(tmp_path / "sweeps/there"), results_of(local_sweep)
    assert there == here
    assert [(row["trial"], row["exit_code"], row["steps"]) for row in there] == [("2", "0", "40"), ("1", "0", "40")]


@pytest.mark.release  # the cases above prove detached pods, and a sweep as tasks
def test_a_killed_trial_of_a_detached_sweep_in_pods_is_continued_and_the_last_pod_ranks(
    cluster, local_sweep, tmp_path, monkeypatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code, output = call(tmp_path, *sweep_of_two(tmp_path), *_PODS, "--name", "there", "--detach")
    assert (code, "submitted to kubernetes: 2 trials in job job/sweep-there-" in output) == (0, True), output
    killed = RunDirectory(tmp_path / "sweeps/there/trial_0001")
    with running_pods(cluster, job_of(tmp_path / "sweeps/there"), tmp_path) as kubelet:
        wait_until(lambda: killed.metrics.exists() and len(steps_of(killed)) > 6, 120)
        kubelet.kill(0)
        wait_until(lambda: "  state    COMPLETE (" in shown("status", tmp_path / "sweeps/there"), 120)
        assert len(kubelet.started) == 3
    logs = shown("logs", tmp_path / "sweeps/there")
    assert logs.count("2 of 2 trials ranked by validation_loss") == 1
    (resumed,) = events_of(killed, "resumed")
    assert resumed["step"] >= 5
    assert_same_trials(tmp_path / "sweeps/there", local_sweep)
