"""The `launcher.slurm` section: what a job asks of Slurm."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class SlurmSpec:
    """Options of sbatch by their names there; null: not given. Nodes are `cluster.nodes`, one task a node."""

    account: str | None = setting(None, "Account that is charged.")
    partition: str | None = setting(None, "Partition of the nodes; null: the cluster's default.")
    qos: str | None = setting(None, "Quality of service.")
    time: str | None = setting(
        None, "Time limit of the job: MM:SS, HH:MM:SS or D-HH[:MM[:SS]]; null: that of the partition."
    )
    constraint: str | None = setting(None, "Features that every node must have, such as `h100&nvlink`.")
    reservation: str | None = setting(None, "Reservation that has the nodes.")
    nodelist: str | None = setting(None, "Nodes that must be among those of the job, such as `n[01-04]`.")
    exclude: str | None = setting(None, "Nodes that the job must not get, such as `n07,n[11-12]`.")
    spare_nodes: int = setting(
        0,
        "Nodes that the job has more than `cluster.nodes`: one takes the place of a node that is lost or failed the "
        "preflight.",
        "nodes",
        minimum=0,
    )
    replace_stragglers: bool = setting(
        False,
        "Save and restart with a spare node in place of one whose ranks compute slower than the others or wait for a "
        "CPU (train.straggler_interval), or whose links are slower (launcher.preflight).",
    )
    exclusive: bool = setting(True, "Take whole nodes, shared with no other job.")
    gres: str | None = setting(
        None,
        "Generic resources of each node, such as gpu:h100:8; null: --gpus-per-node=<cluster.devices_per_node> for an "
        "accelerator; none: neither, where the cluster does not count its GPUs.",
    )
    cpus_per_task: int | None = setting(
        None, "CPUs of each node for its one task; null: all that the job has there.", minimum=1, maximum=4096
    )
    mem: str | None = setting(None, "Memory of each node, such as 900G; `'0'`: all; null: the cluster's default.")
    signal: str | None = setting(
        "USR1@120", "Warning that lets the workers save, and the seconds before the time limit at which it comes."
    )
    requeue: bool = setting(
        True, "Queue the job again after a failed node, a preemption or a save before the time limit; it then resumes."
    )
    max_requeues: int = setting(
        100, "Restarts of a job after which the script does not queue it again.", minimum=0, maximum=100_000
    )
    dependency: str | None = setting(None, "Jobs to wait for, such as afterok:1234.")
    container_image: str | None = setting(None, "Image of the pyxis plug-in in which the tasks run.")
    container_mounts: tuple[str, ...] = setting((), "Mounts of the container: SOURCE:TARGET[:FLAGS].")
    container_workdir: str | None = setting(None, "Working directory in the container; null: that of the command.")
    extra: tuple[str, ...] = setting((), "Further options of sbatch, such as --mail-type=END, a line each.")
