"""Rules of pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.nearby import multiples, nearest
from megalaunch.plan.rules.registry import Broken, Situation, rule


@rule("parallel.layers_by_pp", "Layers divide over pipeline stages.")
def layers_by_pp(at: Situation) -> Iterator[Broken]:
    """Every stage has the same number of layers."""
    layers, pp = at.spec.model.num_layers, at.spec.parallel.pp
    if layers % pp:
        rest = at.shards // pp
        legal = nearest(
            "parallel.pp",
            pp,
            lambda n: layers % n == 0 and (at.world is None or at.world % rest != 0 or at.world % (rest * n) == 0),
        )
        numbers = {"num_layers": layers, "pp": pp}
        yield Broken("parallel.pp", f"{layers} layers do not divide by pp {pp}", numbers, (*legal,))


@rule("parallel.vpp_needs_pp", "Virtual stages interleave real ones, so pp is above 1.")
def vpp_needs_pp(at: Situation) -> Iterator[Broken]:
    """Without a pipeline there is no bubble to shrink."""
    vpp, pp = at.spec.parallel.vpp, at.spec.parallel.pp
    if vpp is not None and vpp > 1 and pp == 1:
        yield Broken(
            "parallel.vpp",
            f"vpp {vpp} interleaves pipeline stages, and pp is 1",
            {"vpp": vpp, "pp": pp},
            ({"parallel.vpp": None}, {"parallel.pp": 2}),
        )


@rule("parallel.layers_by_vpp", "The layers of a stage divide over its virtual stages.")
def layers_by_vpp(at: Situation) -> Iterator[Broken]:
    """Every virtual stage has the same number of layers."""
    layers, pp, vpp = at.spec.model.num_layers, at.spec.parallel.pp, at.spec.parallel.vpp
    if vpp is None or vpp == 1 or pp == 1 or layers % pp or (layers // pp) % vpp == 0:
        return
    yield Broken(
        "parallel.vpp",
        f"{layers // pp} layers of a stage ({layers} / pp {pp}) do not divide by vpp {vpp}",
        {"num_layers": layers, "pp": pp, "vpp": vpp, "layers_per_stage": layers // pp},
        (*nearest("parallel.vpp", vpp, lambda n: (layers // pp) % n == 0), {"parallel.vpp": None}),
    )


@rule("parallel.vpp_microbatches", "Interleaved stages take microbatches in groups of pp.")
def vpp_microbatches(at: Situation) -> Iterator[Broken]:
    """Each stage runs pp microbatches of one chunk before the next chunk."""
    batch, p = at.spec.batch, at.spec.parallel
    if p.vpp is None or p.vpp == 1 or p.pp == 1 or at.dp is None or batch.micro_batch_size is None:
        return
    microbatches, rest = divmod(batch.global_batch_size, batch.micro_batch_size * at.dp)
    if rest == 0 and microbatches % p.pp:
        step = batch.micro_batch_size * at.dp * p.pp
        yield Broken(
            "batch.global_batch_size",
            f"{microbatches} microbatches do not divide into groups of pp {p.pp}, which vpp {p.vpp} needs",
            {"microbatches": microbatches, "pp": p.pp, "vpp": p.vpp},
            (*multiples("batch.global_batch_size", batch.global_batch_size, step), {"parallel.vpp": None}),
        )
