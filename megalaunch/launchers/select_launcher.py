"""Select the launcher of a run by its name."""

from __future__ import annotations

from megalaunch.launchers.launcher import Launcher, LauncherError
from megalaunch.launchers.tasks import TaskRunner, TaskScheduler
from megalaunch.schema.launcher import LauncherSpec


def select_launcher(name: str) -> Launcher:
    """Return the launcher of `launcher.name`.

    Raises:
        LauncherError: no launcher of other machines has this name; `local` has none.
    """
    if name == "slurm":
        from megalaunch.launchers.slurm.launcher import SlurmLauncher

        return SlurmLauncher()
    if name == "ssh":
        from megalaunch.launchers.ssh.launcher import SshLauncher

        return SshLauncher()
    if name == "kubernetes":
        from megalaunch.launchers.kubernetes.launcher import KubernetesLauncher

        return KubernetesLauncher()
    if name == "ray":
        from megalaunch.launchers.ray.launcher import RayLauncher

        return RayLauncher()
    raise LauncherError(f"there is no launcher {name!r} for other machines")


def select_task_launcher(settings: LauncherSpec, detach: bool = False) -> TaskRunner | TaskScheduler:
    """Return what runs or submits independent tasks for `launcher.name`.

    Args:
        detach: the tasks should live on without this process; it is attached nevertheless where they cannot.

    Raises:
        LauncherError: no launcher has this name, or it has no place for tasks.
    """
    name = settings.name
    if name == "local":
        from megalaunch.launchers.local_tasks import LocalTasks

        return LocalTasks()
    if name == "slurm":
        from megalaunch.launchers.slurm.tasks import SlurmTasks

        return SlurmTasks()
    if name == "ssh":
        if not settings.ssh.hosts:
            raise LauncherError("launcher.ssh.hosts has no hosts", "give them: launcher.ssh.hosts=[node0,node1]")
        from megalaunch.launchers.ssh.tasks import SshTasks

        return SshTasks()
    if name == "ray":
        from megalaunch.launchers.ray.tasks import RayTasks

        return RayTasks()
    if name == "kubernetes":
        from megalaunch.launchers.kubernetes.manifest import require_image
        from megalaunch.launchers.kubernetes.tasks import DetachedKubernetesTasks, KubernetesTasks

        require_image(settings.kubernetes)
        return DetachedKubernetesTasks() if detach else KubernetesTasks()
    raise LauncherError(f"there is no launcher {name!r} for independent tasks")
