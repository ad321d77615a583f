"""A training loop of one's own, from the pieces of megalaunch.

    torchrun --nproc-per-node 2 training_loop.py recipe=tiny parallel=tp2 train.steps=20

Every layout computes the same losses. Without torchrun this is one process: add cluster.devices_per_node=1.
"""

import sys
from pathlib import Path

import megalaunch as ml


def train(spec: ml.RunSpec, checkpoint: Path) -> list[float]:
    """Train on every rank; save a checkpoint at the end, and return the loss of each step."""
    losses = []
    with ml.initialize(spec) as mesh:
        model = ml.build_sharded_model(spec, mesh)
        passes = ml.make_forward_backward(spec, mesh, model)
        optimizer = ml.Optimizer(model, spec.optimizer, spec.precision)
        loader = ml.make_data_loader(spec, mesh, ml.build_train_dataset(spec))
        seen = 0
        for step in range(1, spec.train.steps + 1):
            batch = loader.get(step, last=spec.train.steps)
            tokens, *mtp_tokens = ml.count_tokens(batch, mesh)
            contributions = passes.train(batch, tokens, mtp_tokens)
            norm = ml.reduce_gradients(spec, mesh, model)
            rate = ml.learning_rate(spec.schedule, spec.optimizer.lr, step)
            optimizer.step(rate, ml.clip_divisor(norm, spec.optimizer.clip_grad))
            losses.append(ml.mean_loss(contributions, mesh))
            seen += tokens
            if mesh.rank == 0:
                print(f"step {step:3}  loss {losses[-1]:.4f}  gradient norm {norm:.3f}  lr {rate:.2e}", flush=True)
        loader.close()
        ml.save(checkpoint, spec, model, optimizer, ml.TrainProgress(spec.train.steps, seen))
    return losses


def main() -> None:
    """Compose, check and train."""
    spec = ml.prepare_data(ml.compose(sys.argv[1:]))
    errors = [finding for finding in ml.check(spec) if finding.severity == "error"]
    if errors:
        sys.exit("\n".join(f"{finding.path}: {finding.message}" for finding in errors))
    train(spec, Path("checkpoints") / f"step-{spec.train.steps}")


if __name__ == "__main__":
    main()
