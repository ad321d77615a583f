"""A real Kubernetes on this machine: etcd, an API server and controllers on loopback ports, without a kubelet.

Its programs are those of scripts/kube_apiserver (1.20.2). It has the JobSet kind, but not that kind's controller: this
and the kubelet are those of `mini_kubelet`, for which `Kubernetes` is the cluster.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from jobset_crd import GROUP, VERSION, jobset_definition
from launching import wait_until
from paths import ROOT
from pod_log_server import PodLogs, pod_logs
from several_nodes import free_ports

from megalaunch.process import descendants, kill_all

FORBIDDEN = "stranger"  # a context whose user may nothing
_NODES = 2
_TOKENS = {"mini": "token-of-admin,admin,admin,system:masters", FORBIDDEN: f"token-of-stranger,{FORBIDDEN},stranger"}
_START_SECONDS = 60.0  # it takes 4
_PATHS = {
    "namespace": "/api/v1/namespaces",
    "node": "/api/v1/nodes",
    "pod": "/api/v1/namespaces/default/pods",
    "event": "/api/v1/namespaces/default/events",
    "secret": "/api/v1/namespaces/default/secrets",
    "jobset": f"/apis/{GROUP}/{VERSION}/namespaces/default/jobsets",
    "definition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
}

Object = dict[str, Any]


class Kubernetes:
    """The cluster for a test and for the kubelet; `variables` lead kubectl to it."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder = folder
        self._programs = programs
        self._port = free_ports()
        self._tls = ssl.create_default_context()
        self._logs: PodLogs | None = None
        self.variables = {"KUBECONFIG": str(folder / "config"), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}

    def read(self, name: str) -> Object | None:
        """The object `kind/name`; None if there is none."""
        return self._call("GET", self._path(name))

    def items(self, kind: str) -> list[Object]:
        """All objects of a kind."""
        found = self._call("GET", _PATHS[kind])
        assert found is not None
        return list(found["items"])

    def write(self, name: str, found: Object) -> Object:
        """Create an object, or replace the status of one that is there; return what the server keeps."""
        status = found.get("status", {})
        kept = self._call("PATCH", f"{self._path(name)}/status", {"status": status})
        if kept is None:
            kept = self._call("POST", self._path(name).rpartition("/")[0], found)
        assert kept is not None
        assert self._logs is not None
        if status.get("phase") in ("Succeeded", "Failed"):
            self._logs.ended.add(name.partition("/")[2])
        return kept

    def is_deleted(self, name: str) -> bool:
        """Whether a pod is to end, or is gone."""
        found = self.read(name)
        return found is None or "deletionTimestamp" in found["metadata"]

    def remove(self, name: str) -> None:
        """Delete a pod that has ended, as its kubelet does."""
        self._call("DELETE", f"{self._path(name)}?gracePeriodSeconds=0")

    def log(self, pod: str) -> Path:
        """The file that `kubectl logs POD` shows."""
        return self.folder / f"logs/{pod}.log"

    def schemas(self) -> Object:
        """The schemas of all kinds, which the server publishes some time after a definition."""
        found = self._call("GET", "/openapi/v2")
        assert found is not None
        return dict(found["definitions"])

    def create(self, kind: str, found: Object) -> None:
        """Create an object."""
        assert self._call("POST", _PATHS[kind], found) is not None

    def _path(self, name: str) -> str:
        kind, _, rest = name.partition("/")
        return f"{_PATHS[kind]}/{rest}"

    def _call(self, verb: str, path: str, body: Object | None = None) -> Object | None:
        """Call the server as its administrator; None: there is no such object."""
        kind = "application/merge-patch+json" if verb == "PATCH" else "application/json"
        token = _TOKENS["mini"].partition(",")[0]
        request = urllib.request.Request(
            f"https://127.0.0.1:{self._port}{path}",
            method=verb,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {token}", "Content-Type": kind},
        )
        try:
            with urllib.request.urlopen(request, timeout=10, context=self._tls) as answer:
                found: Object = json.loads(answer.read())
                return found
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise AssertionError(f"{verb} {path}: {error.read().decode()}") from error

    @contextmanager
    def _running(self, name: str, *options: str) -> Iterator[None]:
        """Run one of the programs; nothing of it is left."""
        with (self.folder / f"{name}.out").open("wb") as log:
            daemon = subprocess.Popen(
                [str(self._programs / name), *options],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield
        finally:
            left = descendants(daemon.pid)
            daemon.kill()
            daemon.wait()
            kill_all(left, 5)

    def start(self, stack: ExitStack) -> None:
        """Start the programs, and create what a cluster with JobSet and nodes has; the stack ends them."""
        for name in ("bin", "certificates", "logs"):
            (self.folder / name).mkdir()
        (self.folder / "tokens.csv").write_text("".join(f"{token}\n" for token in _TOKENS.values()))
        key = self.folder / "service_accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        first = free_ports()
        client, peer = f"http://127.0.0.1:{first}", f"http://127.0.0.1:{first + 1}"
        stack.enter_context(self._running("etcd", *_etcd_options(client, peer, self.folder)))
        stack.enter_context(self._running("kube-apiserver", *self._server_options(client, key)))
        certificate = self.folder / "certificates/apiserver.crt"
        wait_until(lambda: certificate.exists() and _loads(self._tls, certificate), _START_SECONDS)
        wait_until(self._is_ready, _START_SECONDS)
        self._write_clients(certificate)
        self._logs = stack.enter_context(pod_logs(self.folder / "logs", certificate, certificate.with_suffix(".key")))
        self.create("definition", jobset_definition())
        wait_until(lambda: self._call("GET", _PATHS["jobset"]) is not None, _START_SECONDS)
        for index in range(_NODES):
            self.create("node", self._node(f"worker-{index}", self._logs.server_address[1]))
        # After the definition: its garbage collector learns new kinds only now and then.
        options = (f"--kubeconfig={self.folder}/config", "--controllers=garbagecollector")
        stack.enter_context(self._running("kube-controller-manager", *options, "--leader-elect=false", "--port=0"))

    def _node(self, name: str, port: int) -> Object:
        status = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        }
        return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": status}

    def _server_options(self, etcd: str, key: Path) -> tuple[str, ...]:
        return (
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._port}",
            "--insecure-port=0",
            f"--cert-dir={self.folder}/certificates",
            "--service-account-issuer=https://mini",
            f"--service-account-signing-key-file={key}",
            f"--service-account-key-file={key}",
            f"--token-auth-file={self.folder}/tokens.csv",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.96.0.0/24",
            "--disable-admission-plugins=ServiceAccount",
        )

    def _is_ready(self) -> bool:
        try:
            return self.read("namespace/default") is not None
        except (OSError, AssertionError):
            return False

    def _write_clients(self, certificate: Path) -> None:
        """Write the configuration of kubectl, and a kubectl that keeps what it learns in this folder."""
        users = [{"name": name, "user": {"token": words.partition(",")[0]}} for name, words in _TOKENS.items()]
        cluster = {"server": f"https://127.0.0.1:{self._port}", "certificate-authority": str(certificate)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "mini", "cluster": cluster}],
            "users": users,
            "contexts": [{"name": name, "context": {"cluster": "mini", "user": name}} for name in _TOKENS],
            "current-context": "mini",
        }
        (self.folder / "config").write_text(json.dumps(config))
        program = self.folder / "bin/kubectl"
        program.write_text(f'#!/bin/sh\nexec "{self._programs}/kubectl" --cache-dir="{self.folder}/cache" "$@"\n')
        program.chmod(0o755)


@contextmanager
def mini_kubernetes(folder: Path) -> Iterator[Kubernetes]:
    """Start the cluster; nothing of it is left. The test is skipped where its programs are not built."""
    script = ROOT / "scripts/kube_apiserver"
    programs = Path(subprocess.run([script, "--path"], check=True, capture_output=True, text=True).stdout.strip())
    if not (programs / "kubectl").exists():
        pytest.skip("a Kubernetes API server is not built here (scripts/kube_apiserver)")
    cluster = Kubernetes(folder, programs)
    with ExitStack() as stack:
        cluster.start(stack)
        yield cluster


def _etcd_options(client: str, peer: str, folder: Path) -> tuple[str, ...]:
    return (
        f"--data-dir={folder}/etcd",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
    )


def _loads(context: ssl.SSLContext, certificate: Path) -> bool:
    try:
        context.load_verify_locations(certificate)
    except ssl.SSLError:  # not written to its end
        return False
    return True
