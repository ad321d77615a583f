"""Naming the culprit among victims, and a report that fits in fifteen lines."""

from __future__ import annotations

import pytest
from launching import events_of, tiny_spec

from megalaunch.launch.agent import exit_codes
from megalaunch.launch.display.event_messages import event_message
from megalaunch.launch.display.report import failure_report
from megalaunch.launch.failure import first_failure, name_out_of_memory, record_failure
from megalaunch.launch.hang.collective_mismatch import Culprit
from megalaunch.launch.hang.rank_monitor import Rank
from megalaunch.launch.storage_monitor import StorageMonitor
from megalaunch.launch.supervise import LaunchResult
from megalaunch.platform.cgroups import OomKills
from megalaunch.rundir.outcome import ExitCode, Outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import Progress
from megalaunch.rundir.worker_failure import Failure, describe_exit


def rank(number: int, code: int | None = None, step: int = 5, held_on: bool = False) -> Rank:
    progress = Progress(number, 100 + number, 0, f"dp{number}", "step", step, 9, 1000.0 + number)
    return Rank(progress, None, ended=True, return_code=code, outlived_peer=held_on)


def event(number: int, exception: str, message: str, time: float = 1.0) -> dict[str, object]:
    where = {"rank": number, "coordinates": f"dp{number}", "phase": "step", "step": 5}
    return {"event": "worker_failed", "time": time, **where, "exception": exception, "message": message}


LOST = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"


def test_an_exception_beats_a_lost_connection_that_was_reported_earlier():
    events = [event(0, "RuntimeError", LOST, time=1.0), event(1, "ValueError", "bad", time=2.0)]
    found = first_failure(0, events, {0: rank(0, 1), 1: rank(1, 1)}, {}, 5)
    assert (found.rank, found.exception, found.message) == (1, "ValueError", "bad")


def test_a_silent_death_beats_a_lost_connection():
    found = first_failure(0, [event(0, "RuntimeError", LOST)], {0: rank(0, 1), 1: rank(1, -9)}, {}, 5)
    assert (found.rank, found.coordinates, found.exception) == (1, "dp1", "SIGKILL")
    assert found.message == "killed from outside, possibly by the out-of-memory killer"


def test_the_agents_log_knows_how_it_ended(tmp_path):
    log = tmp_path / "agent.log"
    log.write_text(
        "E1121 api.py:1018] failed (exitcode: -11) local_rank: 1 (pid: 101) of binary: /usr/bin/python\n"
        "  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: 100)\n  exitcode  : -15 (pid: 99)\n"
    )
    assert exit_codes(log) == {101: -11, 100: 1, 99: -15}
    found = first_failure(0, [], {0: rank(0), 1: rank(1)}, exit_codes(log), 5)
    assert (found.rank, found.exception) == (0, "exit code 1")
    found = first_failure(0, [event(0, "RuntimeError", LOST)], {0: rank(0), 1: rank(1)}, exit_codes(log), 5)
    assert (found.rank, found.exception) == (1, "SIGSEGV")


def test_those_the_agent_ended_come_last():
    found = first_failure(0, [], {0: rank(0, -15), 1: rank(1, -9)}, {}, 5)
    assert found.rank == 1


def test_who_held_on_while_the_others_timed_out_hung():
    timed_out = event(0, "RuntimeError", "Timed out waiting 30000ms for recv operation to complete")
    found = first_failure(0, [timed_out], {0: rank(0, 1), 1: rank(1, -9, held_on=True)}, {}, 5)
    assert (found.rank, found.exception) == (1, "hang")


def test_of_victims_only_the_first_in_the_file_is_named_whatever_the_clocks_say():
    found = first_failure(0, [event(0, "RuntimeError", LOST, 2.0), event(1, "RuntimeError", LOST, 1.0)], {}, {}, 5)
    assert found.rank == 0


def test_of_exceptions_the_first_in_the_file_is_named_whatever_the_clocks_say():
    found = first_failure(0, [event(1, "ValueError", "bad", 2.0), event(0, "KeyError", "lost", 1.0)], {}, {}, 5)
    assert (found.rank, found.exception) == (1, "ValueError")


def test_the_launcher_writes_a_failure_as_an_event(tmp_path):
    directory = RunDirectory(tmp_path)
    failure = Failure(2, 1, "dp1", "step", 7, "SIGKILL", "killed from outside")
    record_failure(StorageMonitor(directory, 600.0), failure)
    (written,) = events_of(directory, "worker_failed")
    assert first_failure(2, [written], {}, {}, 0) == failure
    assert written["attempt"] == 2


def test_nobody_reported():
    found = first_failure(0, [], {}, {}, 0, agent_code=1)
    assert (found.rank, found.source, found.error) == (None, "the agent", "exit code 1: no worker reported an error")


def test_a_killed_agent_takes_its_workers_with_it():
    ranks = {0: rank(0, -9), 1: rank(1, -9)}
    found = first_failure(0, [event(0, "RuntimeError", LOST)], ranks, {}, 5, agent_code=-9)
    assert (found.source, found.step, found.exception) == ("the agent", 5, "SIGKILL")
    found = first_failure(0, [event(1, "ValueError", "bad")], ranks, {}, 5, agent_code=-9)
    assert (found.rank, found.exception) == (1, "ValueError")  # before somebody killed the agent too


def test_an_abort_in_a_collective_is_no_proof_against_a_suspect():
    ranks = {0: rank(0, -6), 1: rank(1, 1)}
    lost = [event(1, "RuntimeError", LOST)]
    suspect = Culprit(1, "it runs all_reduce of [7]")
    found = first_failure(0, lost, ranks, {}, 5, suspect, aborted={0})
    assert (found.rank, found.exception, found.message) == (1, "collective mismatch", suspect.message)
    found = first_failure(0, lost, ranks, {}, 5, suspect)  # it was aborted elsewhere
    assert (found.rank, found.exception) == (0, "SIGABRT")


@pytest.mark.parametrize(
    ("rank", "used", "allowed", "title"),
    [
        (1, 3, 3, "a worker crashed; restarts used: 3 of 3 (launcher.max_restarts)"),
        (1, 0, 0, "a worker crashed"),
        (None, 3, 3, "the elastic agent failed; restarts used: 3 of 3 (launcher.max_restarts)"),
        (None, 0, 3, "the elastic agent failed"),
    ],
)
def test_titles_say_who_failed_and_whether_restarts_were_used_up(tmp_path, rank, used, allowed, title):
    failure = Failure(0, rank, "", "step", 7, "SIGKILL", "")
    end = LaunchResult(Outcome(5, "", 7, {"restarts_in_a_row": used}), failure)
    lines = failure_report(tiny_spec(launcher__max_restarts=allowed), RunDirectory(tmp_path), end)
    assert lines[0] == f"megalaunch: {title} (exit code 5)"


@pytest.mark.parametrize(
    ("phase", "key"), [("step", "step_timeout"), ("loading torch", "start_timeout"), ("saving", "hang_timeout")]
)
def test_a_hang_names_the_limit_that_it_passed(tmp_path, phase, key):
    end = LaunchResult(Outcome(6, "", 7), Failure(0, 1, "", phase, 7, "hang", ""))
    assert failure_report(tiny_spec(), RunDirectory(tmp_path), end)[-1].endswith(f"raise launcher.{key}")


@pytest.mark.parametrize(
    ("code", "name"), [(-9, "SIGKILL"), (-11, "SIGSEGV"), (3, "exit code 3"), (-64, "SIGRTMAX"), (None, "ended")]
)
def test_describe_exit(code, name):
    assert describe_exit(code)[0] == name


def test_a_report_of_a_crash(tmp_path):
    failure = Failure(2, 1, "dp1", "step", 7, "ValueError", "too " + "long " * 200)
    end = LaunchResult(Outcome(5, "rank 1", 6, {"rank": 1}), failure)
    lines = failure_report(tiny_spec(), RunDirectory(tmp_path), end)
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 120
    text = "\n".join(lines)
    for part in ("exit code 5", "rank 1 (dp1)", "step 7", "attempt 3", "ValueError: too long", "rank_1.log", "next"):
        assert part in text
    assert text.count("[...]") == 1


def test_a_report_without_a_culprit_quotes_the_agents_log(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.logs.mkdir()
    (directory.logs / "agent.log").write_text("\n".join(f"line {n}" for n in range(50)) + "\nNo module named torch\n")
    end = LaunchResult(Outcome(5, "x", 0), Failure(0, None, "", "starting", 0, "ended", "no worker reported an error"))
    lines = failure_report(tiny_spec(), directory, end)
    assert len(lines) <= 15
    assert "  | No module named torch" in lines


@pytest.mark.parametrize("code", [2, 3, 4, 7, 75, 130])
def test_a_report_of_an_end_on_purpose(tmp_path, code):
    details = {"samples": "sample 12: document 3", "rank": 1, "loss": None, "ranks": [{"rank": 0}]}
    lines = failure_report(tiny_spec(), RunDirectory(tmp_path), LaunchResult(Outcome(code, "the reason", 7, details)))
    assert f"(exit code {code})" in lines[0]
    assert "the reason" in lines[1]
    assert any("sample 12: document 3" in line for line in lines) == (code < 75)
    assert "next" in lines[-1]
    assert len(lines) <= 15


def test_a_finished_run_has_no_report(tmp_path):
    assert failure_report(tiny_spec(), RunDirectory(tmp_path), LaunchResult(Outcome(ExitCode.DONE, "", 7))) == []


def test_a_report_of_zero_gradients_does_not_speak_of_numbers_that_are_not_finite(tmp_path):
    details = {"loss": 11.5, "grad_norm": 0.0, "zero_gradient_steps": 10}
    end = LaunchResult(Outcome(7, "the gradient norm is exactly 0 since step 2", 11, details))
    lines = failure_report(tiny_spec(), RunDirectory(tmp_path), end)
    assert lines[0] == "megalaunch: the gradient is zero: no parameter is updated (exit code 7)"
    text = " ".join(" ".join(lines).split())
    assert "finite" not in text
    assert "train.max_zero_grad_steps=0 only warns" in text


def test_a_collapsed_load_shows_in_the_display():
    event = {"event": "expert_collapse", "step": 30, "layer": 2, "share": 0.912, "steps": 20}
    assert event_message(event) == (
        "warning: one expert of layer 2 gets 91% of the tokens, for 20 steps in a row up to step 30: "
        "balance the load (model.moe.balance_loss_coeff, model.moe.balance_bias)"
    )


def test_slow_ranks_show_in_the_display():
    event = {"event": "straggler", "step": 300, "cause": "compute", "ranks": [1], "places": ["rank 1 (dp1) on n1"]}
    assert event_message({**event, "speed": 0.333}) == (
        "warning: rank 1 (dp1) on n1 computes at 33% of the usual speed: look at clock, temperature and other "
        "processes there (3 checks in a row up to step 300)"
    )
    assert event_message({**event, "speed": 0.2, "cause": "cpu"}) == (
        "warning: rank 1 (dp1) on n1 waits for a CPU and trains 20% of the time: look at other processes and CPU "
        "limits there (3 checks in a row up to step 300)"
    )
    both = {"speed": 0.6, "cause": "data", "ranks": [1, 2], "places": ["all 2 ranks on n1"]}
    times = {"data": [0.5, 0.61234], "forward_backward": [0.4, 0.3], "optimizer": [0.05, 0.05], "step": [1.1, 1.2]}
    usual = {"data": 0.0001, "forward_backward": 0.41, "optimizer": 0.0712, "step": 1.15}
    assert event_message({**event, **both, "times": times, "median_times": usual}) == (
        "warning: all 2 ranks on n1 wait for tokens and train 60% of the time: look at the disk or mount of the data "
        "(3 checks in a row up to step 300); seconds a step (median): all 1.200 (1.150), "
        "forward+backward 0.400 (0.410), optimizer 0.050 (0.071), data 0.612 (0.000)"
    )


def test_a_slow_network_shows_in_the_display():
    event = {"event": "network", "nodes": 4, "bandwidth": 21.0, "planned": 40.5, "slow_places": []}
    assert event_message(event) is None
    assert event_message({**event, "planned": None, "bandwidth": 0.1}) is None
    assert event_message({**event, "bandwidth": 3.1}) == (
        "warning: an all-reduce over 4 nodes has 3.1 GB/s, where the plan counts 40.5 GB/s: see which network it takes "
        "(NCCL_DEBUG=INFO), or set cluster.node_bandwidth"
    )
    slow = {"slow_places": ["node 2 (n2)"], "slow_bandwidth": 1.2, "usual_bandwidth": 24.0}
    assert event_message({**event, **slow}) == (
        "warning: node 2 (n2): 1.2 GB/s, where other links have 24.0 GB/s: look at cables, adapters and other traffic "
        "there"
    )


def test_zero_gradients_show_in_the_display():
    event = {"event": "zero_gradient", "step": 2, "limit": 10}
    said = "warning: the gradient norm of step 2 is exactly 0: no parameter is updated"
    assert event_message(event) == f"{said}; the run ends after 10 such steps in a row"
    assert event_message({**event, "limit": 0}) == said


V1 = "sys/fs/cgroup/memory/pod"


@pytest.mark.parametrize(
    ("files", "killed", "message"),
    [
        (
            {"sys/fs/cgroup/job/memory.max": "512000000", "sys/fs/cgroup/job/memory.peak": "511000000"},
            "sys/fs/cgroup/job/memory.events",
            "killed by the kernel for memory: limit of its cgroup 512.0 MB, peak 511.0 MB",
        ),
        (
            {
                f"{V1}/memory.limit_in_bytes": "512000000",
                f"{V1}/run/memory.limit_in_bytes": "9223372036854771712",  # unlimited: the limit is the parent's
                "proc/meminfo": "MemTotal: 16000000 kB\n",
            },
            f"{V1}/run/memory.oom_control",
            "killed by the kernel for memory: limit of its cgroup 512.0 MB",
        ),
        (
            {},
            "proc/vmstat",
            "killed by the kernel for memory: of the machine, or of a cgroup that is not seen from here",
        ),
        ({}, "elsewhere", "killed from outside"),
    ],
)
def test_the_out_of_memory_killer_is_named(tmp_path, files, killed, message):
    groups = {"proc/self/cgroup": "3:memory:/pod/run\n0::/job\n"}
    for name, text in (groups | {killed: "low 0\noom_kill 3\n"} | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before = OomKills.count(tmp_path)
    failure = Failure(0, 1, "dp1", "step", 7, "SIGKILL", "killed from outside")
    assert name_out_of_memory(failure, before) == failure
    (tmp_path / killed).write_text("low 0\noom_kill 4\n")
    assert name_out_of_memory(failure, before).message == message
    crashed = Failure(0, 1, "dp1", "step", 7, "SIGSEGV", "")
    assert name_out_of_memory(crashed, before) == crashed


@pytest.mark.parametrize(
    ("event", "one", "several"),
    [
        ({"event": "launch", "workers": 1}, "starting 1 worker", "starting 2 workers"),
        (
            {"event": "metrics_cut", "after_step": 4, "last_step": 5, "lines": 1},
            "metrics after step 4 removed (1 line): step 5 is trained again",
            "metrics after step 4 removed (2 lines): steps 5 to 6 are trained again",
        ),
    ],
)
def test_messages_are_singular_for_one(event, one, several):
    assert event_message(event) == one
    more = {key: value + 1 for key, value in event.items() if key in ("workers", "last_step", "lines")}
    assert event_message(event | more) == several
