"""Select the launcher of a run by its name."""

from __future__ import annotations

from megalaunch.launchers.launcher import Launcher, LauncherError


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
