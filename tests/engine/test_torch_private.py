"""The private names of torch that older versions lack, by stand-ins of those versions' classes."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

from megalaunch.engine.torch_private import fsdp_unsharded_grads, make_elastic_agent, observe_failed_workers


class Workers:
    """The processes of an agent."""

    def __init__(self) -> None:
        self.closed: list[tuple[signal.Signals, int]] = []

    def close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        self.closed.append((death_sig, timeout))


class OldAgent:
    """As in torch 2.11, which waits 30 seconds."""

    def __init__(self, spec: object, logs_specs: object, exit_barrier_timeout: float = 300) -> None:
        self._pcontext: Workers | None = None

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM) -> None:
        if self._pcontext:
            self._pcontext.close(death_sig)


class NewAgent(OldAgent):
    """As in torch 2.12."""

    def __init__(self, spec: object, logs_specs: object, exit_barrier_timeout: float, shutdown_timeout: int) -> None:
        super().__init__(spec, logs_specs, exit_barrier_timeout)
        self.shutdown_timeout = shutdown_timeout


class Handler:
    """A started command that has ended."""

    def __init__(self, code: int) -> None:
        self.proc = SimpleNamespace(returncode=code)


def test_an_agent_without_the_setting_waits_as_long_as_asked(monkeypatch):
    monkeypatch.setattr(local_elastic_agent, "LocalElasticAgent", OldAgent)
    agent = make_elastic_agent(None, None, 7, exit_barrier_timeout=1.0)
    agent._shutdown()  # before any worker was started
    agent._pcontext = workers = Workers()
    agent._shutdown(signal.SIGINT)
    assert workers.closed[0] == (signal.SIGINT, 7)
    agent._shutdown()
    assert workers.closed[2] == (signal.SIGTERM, 7)


def test_an_agent_with_the_setting_gets_it(monkeypatch):
    monkeypatch.setattr(local_elastic_agent, "LocalElasticAgent", NewAgent)
    agent = make_elastic_agent(None, None, 7, exit_barrier_timeout=1.0)
    assert (type(agent), agent.shutdown_timeout) == (NewAgent, 7)


@pytest.mark.parametrize(
    "workers",
    [
        SimpleNamespace(subprocess_handlers={0: Handler(-15), 1: Handler(-9)}),
        SimpleNamespace(_pc=SimpleNamespace(processes=[SimpleNamespace(exitcode=-15), SimpleNamespace(exitcode=-9)])),
    ],
    ids=["commands", "forked"],
)
def test_exit_codes_of_failed_workers_begin_with_the_failure(workers):
    group = SimpleNamespace(workers=[SimpleNamespace(global_rank=2), SimpleNamespace(global_rank=3)])
    results = [RunResult(WorkerState.HEALTHY), RunResult(WorkerState.FAILED, {}, {3: None})]
    agent = SimpleNamespace(_pcontext=workers, _monitor_workers=lambda group: results.pop(0))
    seen: list[dict[int, int | None]] = []
    observe_failed_workers(agent, seen.append)
    assert agent._monitor_workers(group).state == WorkerState.HEALTHY
    assert seen == []
    assert agent._monitor_workers(group).is_failed()
    assert [list(codes.items()) for codes in seen] == [[(3, -9), (2, -15)]]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"_fsdp_param_groups": ["a", "b"]}, ["a", "b"]),
        ({"_fsdp_param_group": "a"}, ["a"]),
        ({"_fsdp_param_group": None}, []),
    ],
)
def test_parameter_groups_by_either_name(state, expected):
    def group(grad: str) -> SimpleNamespace:
        return SimpleNamespace(fsdp_params=[SimpleNamespace(unsharded_accumulated_grad=grad)])

    made = {
        name: [group(one) for one in value] if isinstance(value, list) else value and group(value)
        for name, value in state.items()
    }
    unit = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(**made))
    assert list(fsdp_unsharded_grads(unit)) == expected
