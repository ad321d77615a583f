"""Rules of how layers are divided over pipeline stages; what is wrong is found in plan/stage_faults.py."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.nearby import nearest
from megalaunch.plan.rules.registry import Broken, Fix, Situation, rule
from megalaunch.plan.stage_faults import StageFault
from megalaunch.plan.stages import MAX_LAYERS, stages_of

_EVEN: Fix = {"parallel.first_stage_layers": None, "parallel.last_stage_layers": None}
_NO_LAYOUT: Fix = {"parallel.stage_layout": None}
_UNCOUNTED: Fix = {"parallel.embedding_as_layer": False, "parallel.head_as_layer": False}


def _faults(at: Situation, rule_id: str) -> Iterator[StageFault]:
    return (fault for fault in at.stage_faults if fault.rule == rule_id)


def _broken(fault: StageFault, *fixes: Fix) -> Broken:
    return Broken(fault.path, fault.message, fault.numbers, fixes)


@rule("parallel.layers_by_pp", "Layers divide over pipeline stages.")
def layers_by_pp(at: Situation) -> Iterator[Broken]:
    """Every rank has the same number of layers, unless its ends are told apart or a layout is written out."""
    for fault in _faults(at, "parallel.layers_by_pp"):
        yield _broken(fault, *_legal_pp(at), *_counted_ends(at), *_uneven_ends(at))


def _legal_pp(at: Situation) -> Iterator[Fix]:
    p = at.spec.parallel
    rest, layers = at.shards // p.pp, at.spec.model.num_layers + p.embedding_as_layer + p.head_as_layer

    def legal(pp: int) -> bool:
        return layers % pp == 0 and (at.world is None or at.world % rest != 0 or at.world % (rest * pp) == 0)

    return nearest("parallel.pp", p.pp, legal)


def _counted_ends(at: Situation) -> Iterator[Fix]:
    """Embedding and head counted as layers or not, where that makes the shares even; vpp follows the new share."""
    p, layers = at.spec.parallel, at.spec.model.num_layers
    for embedding, head in ((True, True), (False, True), (False, False)):
        share, rest = divmod(layers + embedding + head, p.pp)
        if rest:
            continue
        counted: Fix = {"parallel.embedding_as_layer": embedding, "parallel.head_as_layer": head}
        if p.vpp is None or share % p.vpp == 0:
            yield counted
        else:
            yield from ({**counted, **other} for other in _divisors("parallel.vpp", p.vpp, share))


def _uneven_ends(at: Situation) -> Iterator[Fix]:
    """A last (or first and last) rank with fewer layers than the others."""
    p, layers = at.spec.parallel, at.spec.model.num_layers
    plain = not (p.embedding_as_layer or p.head_as_layer)
    for share in (-(-layers // p.pp), layers // p.pp):
        last = layers - share * (p.pp - 1)
        if plain and p.pp > 1 and share > 0 and 0 < last < 2 * share:
            yield {"parallel.last_stage_layers": last}


@rule("parallel.vpp_needs_pp", "Virtual stages interleave real ones, so pp is above 1.")
def vpp_needs_pp(at: Situation) -> Iterator[Broken]:
    """Without a pipeline there is no bubble to shrink."""
    for fault in _faults(at, "parallel.vpp_needs_pp"):
        yield _broken(fault, {"parallel.vpp": None}, {"parallel.pp": 2}, {**_NO_LAYOUT, "parallel.vpp": None})


@rule("parallel.layers_by_vpp", "The layers of a pipeline rank divide over its virtual stages.")
def layers_by_vpp(at: Situation) -> Iterator[Broken]:
    """Every virtual stage of a rank has the same number of layers."""
    p = at.spec.parallel
    for fault in _faults(at, "parallel.layers_by_vpp"):
        shared = fault.numbers.get("layers_per_stage", p.first_stage_layers or p.last_stage_layers or 1)
        others = [fix for fix in _divisors("parallel.vpp", p.vpp or 1, shared) if fix["parallel.vpp"] > 1]
        yield _broken(fault, *others, {"parallel.vpp": None}, _EVEN)


def _divisors(key: str, value: int, whole: int) -> Iterator[Fix]:
    return nearest(key, value, lambda n: whole % n == 0)


@rule("parallel.one_division", "One setting says how layers are divided: counted ends, uneven ends, or a layout.")
def one_division(at: Situation) -> Iterator[Broken]:
    """Two of them would contradict each other."""
    for fault in _faults(at, "parallel.one_division"):
        yield _broken(fault, _UNCOUNTED, {**_UNCOUNTED, **_EVEN}, _EVEN, _NO_LAYOUT)


@rule("parallel.uneven_needs_pp", "Uneven ends are those of a pipeline, so pp is above 1.")
def uneven_needs_pp(at: Situation) -> Iterator[Broken]:
    """One rank has all layers."""
    for fault in _faults(at, "parallel.uneven_needs_pp"):
        yield _broken(fault, _EVEN, {"parallel.pp": 2})


@rule("parallel.uneven_rest", "What uneven ends leave divides over the ranks between them.")
def uneven_rest(at: Situation) -> Iterator[Broken]:
    """Ranks in the middle have the same number of layers, and at least one each."""
    p = at.spec.parallel
    first, last = p.first_stage_layers, p.last_stage_layers
    for fault in _faults(at, "parallel.uneven_rest"):
        ranks, fixes = fault.numbers["ranks"], list[Fix]()
        if last is not None:
            fixes += _other_end("parallel.last_stage_layers", last, at.spec.model.num_layers - (first or 0), ranks)
        if first is not None:
            fixes += _other_end("parallel.first_stage_layers", first, at.spec.model.num_layers - (last or 0), ranks)
        yield _broken(fault, *fixes, _EVEN)


def _other_end(key: str, value: int, left: int, ranks: int) -> Iterator[Fix]:
    """Counts of one end near the wrong one that leave an even share for the middle."""

    def legal(n: int) -> bool:
        rest = left - n
        return rest >= 0 and (ranks == 0) == (rest == 0) and (ranks == 0 or rest % ranks == 0)

    return nearest(key, value, legal, 2)


@rule("parallel.layout_grammar", "A stage layout is written in the letters E t m L | with *n and brackets.")
def layout_grammar(at: Situation) -> Iterator[Broken]:
    """It is Megatron-LM's notation: `Et*3|(tt|)*28m|L`."""
    for fault in _faults(at, "parallel.layout_grammar"):
        yield _broken(fault, _NO_LAYOUT)


@rule("parallel.layout_by_pp", "The stages of a layout divide over pipeline ranks.")
def layout_by_pp(at: Situation) -> Iterator[Broken]:
    """Every rank has the same number of stages."""
    for fault in _faults(at, "parallel.layout_by_pp"):
        yield _broken(fault, *_divisors("parallel.pp", at.spec.parallel.pp, fault.numbers["stages"]), _NO_LAYOUT)


@rule("parallel.layout_by_vpp", "A vpp beside a stage layout is the layout's own.")
def layout_by_vpp(at: Situation) -> Iterator[Broken]:
    """The layout says how many stages a rank has; vpp may be left out."""
    for fault in _faults(at, "parallel.layout_by_vpp"):
        yield _broken(fault, {"parallel.vpp": None}, _NO_LAYOUT)


@rule("parallel.layout_ends", "A layout begins with the embedding and ends with the head, each once.")
def layout_ends(at: Situation) -> Iterator[Broken]:
    """A microbatch enters at the first stage, and its loss is at the last."""
    for fault in _faults(at, "parallel.layout_ends"):
        yield _broken(fault, _NO_LAYOUT)


@rule("parallel.layout_layers", "A layout has as many layers as the model.")
def layout_layers(at: Situation) -> Iterator[Broken]:
    """Every decoder layer lies on one stage."""
    for fault in _faults(at, "parallel.layout_layers"):
        written = fault.numbers["layout_layers"]
        yield _broken(fault, _NO_LAYOUT, *([{"model.num_layers": written}] if written else []))


@rule("parallel.layout_mtp", "A layout has as many MTP depths as the model.")
def layout_mtp(at: Situation) -> Iterator[Broken]:
    """Every depth lies on one stage."""
    for fault in _faults(at, "parallel.layout_mtp"):
        yield _broken(fault, _NO_LAYOUT, {"model.mtp.num_layers": fault.numbers["layout_mtp_layers"]})


@rule("parallel.layout_mtp_place", "MTP depths follow all layers, together, on the last stage of a later rank.")
def layout_mtp_place(at: Situation) -> Iterator[Broken]:
    """They read the decoder's last state and the embedding, and send on to the head."""
    for fault in _faults(at, "parallel.layout_mtp_place"):
        yield _broken(fault, _NO_LAYOUT)


@rule("parallel.empty_stages", "Every stage has something to compute.")
def empty_stages(at: Situation) -> Iterator[Broken]:
    """A stage without layer, embedding, MTP depth or head only passes tensors on, and costs a turn."""
    p = at.spec.parallel
    if at.stage_faults or at.spec.model.num_layers > MAX_LAYERS or (p.stage_layout is None and not _has_ends(at)):
        return
    empty = [
        number
        for number, stage in enumerate(stages_of(at.spec))
        if not (stage.layers or stage.mtp or stage.embedding or stage.head)
    ]
    if empty:
        yield Broken(
            "parallel.stage_layout" if p.stage_layout is not None else "parallel.pp",
            f"{'stage' if len(empty) == 1 else 'stages'} {_listed(empty)} {'has' if len(empty) == 1 else 'have'} "
            "nothing to compute",
            {"empty_stages": empty},
            (_NO_LAYOUT, _EVEN),
            "warning",
        )


def _has_ends(at: Situation) -> bool:
    p = at.spec.parallel
    return p.first_stage_layers is not None or p.last_stage_layers is not None


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown}, ..." if len(numbers) > 8 else shown


@rule("parallel.counted_ends_need_pp", "Embedding and head count as layers where layers are shared out.")
def counted_ends_need_pp(at: Situation) -> Iterator[Broken]:
    """With pp 1 one rank has everything, and the setting has no effect."""
    p = at.spec.parallel
    for name, counted in (("embedding_as_layer", p.embedding_as_layer), ("head_as_layer", p.head_as_layer)):
        if counted and p.pp == 1:
            message = f"{name} has no effect: pp is 1"
            yield Broken(f"parallel.{name}", message, {"pp": 1}, ({f"parallel.{name}": False},), "warning")


@rule("parallel.balanced_ranks", "No pipeline rank has far more layers than the others.")
def balanced_ranks(at: Situation) -> Iterator[Broken]:
    """Every step takes as long as the slowest rank; the others wait for it."""
    p = at.spec.parallel
    if p.pp == 1 or at.stage_faults or at.spec.model.num_layers > MAX_LAYERS:
        return
    if p.stage_layout is None and not _has_ends(at):
        return
    layers = [0] * p.pp
    for stage in stages_of(at.spec):
        layers[stage.rank] += len(stage.layers) + len(stage.mtp)
    most, mean = max(layers), sum(layers) / p.pp
    if most >= mean + 2 and most > 1.5 * mean:
        yield Broken(
            "parallel.stage_layout" if p.stage_layout is not None else "parallel.pp",
            f"pp rank {layers.index(most)} has {most} layers, and ranks have {mean:.4g} on average: the others wait",
            {"most": most, "mean": round(mean, 3)},
            (_NO_LAYOUT, _EVEN),
            "warning",
        )


@rule("parallel.embedding_copies", "The embedding matrix lies on one pipeline rank.")
def embedding_copies(at: Situation) -> Iterator[Broken]:
    """A tied head and MTP depths use it too; on other ranks they hold copies whose gradients are summed each step."""
    model, p = at.spec.model, at.spec.parallel
    if (
        p.pp == 1
        or at.stage_faults
        or model.num_layers > MAX_LAYERS
        or not (model.tied_embeddings or model.mtp.num_layers)
    ):
        return
    stages = stages_of(at.spec)
    ranks = {stages[0].rank: "the embedding"}
    for stage in stages:
        if stage.mtp:
            ranks.setdefault(stage.rank, "MTP")
        if stage.head and model.tied_embeddings:
            ranks.setdefault(stage.rank, "the tied head")
    if len(ranks) > 1:
        held = ", ".join(f"pp rank {rank} ({why})" for rank, why in ranks.items())
        yield Broken(
            "model.tied_embeddings" if model.tied_embeddings else "model.mtp.num_layers",
            f"the embedding matrix is held by {held}; its gradients are summed over them each step",
            {"ranks": sorted(ranks)},
            (),
            "note",
        )
