"""A secret is no setting: it is refused wherever it stands, by a message that does not repeat it."""

from __future__ import annotations

import shlex

import pytest
from rule_cases import TINY, Case, findings_of

SECRETS = {
    "hugging_face": "hf_" + "aB3" * 12,
    "github": "ghp_" + "aB3" * 12,
    "openai": "sk-proj-" + "aB3" * 12,
    "aws": "AKIA" + "ABCD" * 4,
    "json_web_token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTYifQ.c2lnbmF0dXJl",
}
JOB = ("launcher=slurm", "cluster.nodes=2", "cluster.devices_per_node=1")


def findings(*overrides: str):
    return findings_of(Case("", "", TINY), " ".join(overrides))


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("key", ["logging.tracker_project", "run.name", "launcher.slurm.account"])
def test_a_token_is_no_setting(key, name):
    found = findings(f"{key}={SECRETS[name]}")
    (finding,) = [one for one in found if one.path == key]
    assert (finding.rule, finding.severity) == ("run.secret_values", "error")
    assert SECRETS[name] not in str(found)


def test_a_list_loses_the_secret_alone():
    pods = ("launcher=kubernetes", "launcher.kubernetes.image=x")
    token = SECRETS["hugging_face"]
    (finding,) = findings(*pods, f"launcher.kubernetes.environment=['A=b','HUB={token}']")
    assert finding.rule == "run.secret_values"
    assert shlex.split(*finding.fixes) == ['launcher.kubernetes.environment=["A=b"]']


def test_a_password_in_a_url_is_none_either():
    (finding,) = findings("launcher=ray", "launcher.ray.address=ray://me:secret@head:10001")
    assert (finding.rule, finding.path) == ("run.secret_values", "launcher.ray.address")
    assert findings("launcher=ray", "launcher.ray.address=ray://head:10001") == []


def test_words_that_begin_like_a_token_are_settings():
    for text in ("hf_baseline", "task-sk-learn-features-and-a-long-name", "eyJ.a.b", "ghp_run"):
        assert findings(f"run.name={text}") == []


@pytest.mark.parametrize("launcher", ["ssh", "ray"])
def test_variables_to_copy_are_names_alone(launcher):
    key, hosts = f"launcher.{launcher}.environment", "launcher.ssh.hosts=[a]"
    (finding,) = findings(f"launcher={launcher}", hosts, f"{key}=['NCCL_*','HF_TOKEN=abcdef']")
    assert (finding.rule, finding.path) == ("launcher.copied_names", key)
    assert finding.message.startswith("HF_TOKEN=... is no name of a variable: ")
    assert "abcdef" not in str(finding)
    assert shlex.split(*finding.fixes) == [f'{key}=["NCCL_*",HF_TOKEN]']
    assert findings(f"launcher={launcher}", hosts, f"{key}=['NCCL_*',HF_TOKEN,'A[0-9]?']") == []


def test_the_script_of_a_job_exports_no_secret():
    (finding,) = findings(*JOB, "launcher.slurm.extra=['--export=ALL,WANDB_API_KEY=abcdef']")
    assert (finding.rule, finding.fixes) == ("launcher.slurm_extra", ("'launcher.slurm.extra=[]'",))
    assert finding.message.startswith("--export has the value of WANDB_API_KEY, which the script would show: ")
    assert "abcdef" not in finding.message
    assert findings(*JOB, "launcher.slurm.extra=['--export=ALL,HF_HOME=/hub']") == []
