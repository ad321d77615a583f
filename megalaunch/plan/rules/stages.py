"""Rules of the split of layers over pipeline stages; plan/stage_validation.py finds the violations."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import nearest
from megalaunch.plan.stage_validation import StageViolation
from megalaunch.plan.stages import MAX_LAYERS, build_stages

_EVEN: Fix = {"parallel.num_layers_in_first_pipeline_stage": None, "parallel.num_layers_in_last_pipeline_stage": None}
_NO_LAYOUT: Fix = {"parallel.pipeline_layout": None}
_UNCOUNTED: Fix = {
    "parallel.account_for_embedding_in_pipeline_split": False,
    "parallel.account_for_loss_in_pipeline_split": False,
}
_NO_VPP: Fix = {"parallel.vpp": None, "parallel.schedule": "auto"}  # some schedules need vpp


def _faults(at: RuleContext, rule_id: str) -> Iterator[StageViolation]:
    return (fault for fault in at.stage_violations if fault.rule == rule_id)


def _broken(fault: StageViolation, *fixes: Fix) -> Violation:
    return Violation(fault.path, fault.message, fault.numbers, fixes)


@rule("parallel.layers_by_pp", "The number of layers is divisible by pp.")
def layers_by_pp(at: RuleContext) -> Iterator[Violation]:
    """Every pipeline rank has the same number of layers, unless uneven stages or a pipeline layout are given."""
    for fault in _faults(at, "parallel.layers_by_pp"):
        yield _broken(fault, *_legal_pp(at), *_counted_ends(at), *_uneven_ends(at))


def _legal_pp(at: RuleContext) -> Iterator[Fix]:
    p = at.spec.parallel
    rest, layers = (
        at.model_parallel_size // p.pp,
        at.spec.model.num_layers + p.account_for_embedding_in_pipeline_split + p.account_for_loss_in_pipeline_split,
    )

    def legal(pp: int) -> bool:
        return layers % pp == 0 and (at.world is None or at.world % rest != 0 or at.world % (rest * pp) == 0)

    return nearest("parallel.pp", p.pp, legal)


def _counted_ends(at: RuleContext) -> Iterator[Fix]:
    """Yield fixes that count embedding and head as layers or not, if the split is even then; vpp follows."""
    p, layers = at.spec.parallel, at.spec.model.num_layers
    for embedding, head in ((True, True), (False, True), (False, False)):
        share, rest = divmod(layers + embedding + head, p.pp)
        if rest:
            continue
        counted: Fix = {
            "parallel.account_for_embedding_in_pipeline_split": embedding,
            "parallel.account_for_loss_in_pipeline_split": head,
        }
        if p.vpp is None or share % p.vpp == 0:
            yield counted
        else:
            yield from ({**counted, **other} for other in (*_divisors("parallel.vpp", p.vpp, share), _NO_VPP))


def _uneven_ends(at: RuleContext) -> Iterator[Fix]:
    """Yield fixes with fewer or more layers on the last rank."""
    p, layers = at.spec.parallel, at.spec.model.num_layers
    plain = not (p.account_for_embedding_in_pipeline_split or p.account_for_loss_in_pipeline_split)
    for share in (-(-layers // p.pp), layers // p.pp):
        last = layers - share * (p.pp - 1)
        if plain and p.pp > 1 and share > 0 and 0 < last < 2 * share:
            yield {"parallel.num_layers_in_last_pipeline_stage": last}


@rule("parallel.vpp_needs_pp", "vpp is above 1 only with pp above 1.")
def vpp_needs_pp(at: RuleContext) -> Iterator[Violation]:
    """Virtual stages shrink the pipeline bubble; without a pipeline there is none."""
    for fault in _faults(at, "parallel.vpp_needs_pp"):
        yield _broken(fault, {"parallel.vpp": None}, {"parallel.pp": 2}, {**_NO_LAYOUT, "parallel.vpp": None})


@rule("parallel.layers_by_vpp", "The layers of a pipeline rank are divisible by vpp.")
def layers_by_vpp(at: RuleContext) -> Iterator[Violation]:
    """Every virtual stage of a rank has the same number of layers."""
    p = at.spec.parallel
    for fault in _faults(at, "parallel.layers_by_vpp"):
        shared = fault.numbers.get(
            "layers_per_stage", p.num_layers_in_first_pipeline_stage or p.num_layers_in_last_pipeline_stage or 1
        )
        others = [fix for fix in _divisors("parallel.vpp", p.vpp or 1, shared) if fix["parallel.vpp"] > 1]
        yield _broken(fault, *others, {"parallel.vpp": None}, _NO_VPP, _EVEN)


def _divisors(key: str, value: int, number: int) -> Iterator[Fix]:
    return nearest(key, value, lambda n: number % n == 0)


@rule(
    "parallel.one_division",
    "Only one setting splits the layers: counted ends, uneven first and last stages, or a layout.",
)
def one_division(at: RuleContext) -> Iterator[Violation]:
    """Two settings could contradict each other."""
    for fault in _faults(at, "parallel.one_division"):
        yield _broken(fault, _UNCOUNTED, {**_UNCOUNTED, **_EVEN}, _EVEN, _NO_LAYOUT)


@rule("parallel.uneven_needs_pp", "The layers of the first or last stage are given only with pp above 1.")
def uneven_needs_pp(at: RuleContext) -> Iterator[Violation]:
    """With pp 1 one rank has all layers."""
    for fault in _faults(at, "parallel.uneven_needs_pp"):
        yield _broken(fault, _EVEN, {"parallel.pp": 2})


@rule("parallel.uneven_rest", "The layers of the middle stages are divisible by the middle ranks.")
def uneven_rest(at: RuleContext) -> Iterator[Violation]:
    """Middle ranks have the same number of layers, and at least one each."""
    p = at.spec.parallel
    first, last = p.num_layers_in_first_pipeline_stage, p.num_layers_in_last_pipeline_stage
    for fault in _faults(at, "parallel.uneven_rest"):
        ranks, fixes = fault.numbers["ranks"], list[Fix]()
        if last is not None:
            fixes += _other_end(
                "parallel.num_layers_in_last_pipeline_stage", last, at.spec.model.num_layers - (first or 0), ranks
            )
        if first is not None:
            fixes += _other_end(
                "parallel.num_layers_in_first_pipeline_stage", first, at.spec.model.num_layers - (last or 0), ranks
            )
        yield _broken(fault, *fixes, _EVEN)


def _other_end(key: str, value: int, left: int, ranks: int) -> Iterator[Fix]:
    """Yield layer counts of the first or last stage near the invalid one that leave an even split for the middle."""

    def legal(n: int) -> bool:
        rest = left - n
        return rest >= 0 and (ranks == 0) == (rest == 0) and (ranks == 0 or rest % ranks == 0)

    return nearest(key, value, legal, 2)


@rule(
    "parallel.layout_grammar",
    "A pipeline layout has only the letters E t m L, | between stages, *n repeats and parentheses.",
)
def layout_grammar(at: RuleContext) -> Iterator[Violation]:
    """It is Megatron-LM's notation: `Et*3|(tt|)*28m|L`."""
    for fault in _faults(at, "parallel.layout_grammar"):
        yield _broken(fault, _NO_LAYOUT)


@rule("parallel.layout_by_pp", "The stages of a pipeline layout are divisible by pp.")
def layout_by_pp(at: RuleContext) -> Iterator[Violation]:
    """Every rank has the same number of stages."""
    for fault in _faults(at, "parallel.layout_by_pp"):
        yield _broken(fault, *_divisors("parallel.pp", at.spec.parallel.pp, fault.numbers["stages"]), _NO_LAYOUT)


@rule("parallel.layout_by_vpp", "A given vpp equals the stages per rank of the pipeline layout.")
def layout_by_vpp(at: RuleContext) -> Iterator[Violation]:
    """The layout determines vpp, which may be omitted."""
    for fault in _faults(at, "parallel.layout_by_vpp"):
        yield _broken(fault, {"parallel.vpp": None}, _NO_LAYOUT)


@rule("parallel.layout_ends", "A pipeline layout starts with the embedding and ends with the head, each once.")
def layout_ends(at: RuleContext) -> Iterator[Violation]:
    """A microbatch enters at the first stage, and its loss is computed on the last one."""
    for fault in _faults(at, "parallel.layout_ends"):
        yield _broken(fault, _NO_LAYOUT)


@rule("parallel.layout_layers", "A pipeline layout has as many layers as the model.")
def layout_layers(at: RuleContext) -> Iterator[Violation]:
    """Every decoder layer is on exactly one stage."""
    for fault in _faults(at, "parallel.layout_layers"):
        written = fault.numbers["layout_layers"]
        yield _broken(fault, _NO_LAYOUT, *([{"model.num_layers": written}] if written else []))


@rule("parallel.layout_mtp", "A pipeline layout has as many MTP depths as the model.")
def layout_mtp(at: RuleContext) -> Iterator[Violation]:
    """Every MTP depth is on exactly one stage."""
    for fault in _faults(at, "parallel.layout_mtp"):
        yield _broken(fault, _NO_LAYOUT, {"model.mtp.num_layers": fault.numbers["layout_mtp_layers"]})


@rule(
    "parallel.layout_mtp_place", "MTP depths follow all layers, on one stage, the last of a rank other than the first."
)
def layout_mtp_place(at: RuleContext) -> Iterator[Violation]:
    """They need the decoder's final hidden states and the embedding, and they precede the head."""
    for fault in _faults(at, "parallel.layout_mtp_place"):
        yield _broken(fault, _NO_LAYOUT)


@rule("parallel.empty_stages", "Every stage has a layer, an MTP depth, the embedding or the head.")
def empty_stages(at: RuleContext) -> Iterator[Violation]:
    """An empty stage only forwards tensors, which adds latency."""
    p = at.spec.parallel
    if (
        at.stage_violations
        or at.spec.model.num_layers > MAX_LAYERS
        or (p.pipeline_layout is None and not _has_ends(at))
    ):
        return
    empty = [
        number
        for number, stage in enumerate(build_stages(at.spec))
        if not (stage.layers or stage.mtp or stage.embedding or stage.head)
    ]
    if empty:
        yield Violation(
            "parallel.pipeline_layout" if p.pipeline_layout is not None else "parallel.pp",
            f"{'stage' if len(empty) == 1 else 'stages'} {_listed(empty)} {'has' if len(empty) == 1 else 'have'} "
            "no layer, MTP depth, embedding or head",
            {"empty_stages": empty},
            (_NO_LAYOUT, _EVEN),
            "warning",
        )


def _has_ends(at: RuleContext) -> bool:
    p = at.spec.parallel
    return p.num_layers_in_first_pipeline_stage is not None or p.num_layers_in_last_pipeline_stage is not None


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown}, ..." if len(numbers) > 8 else shown


@rule("parallel.counted_ends_need_pp", "Embedding and head count as layers only with pp above 1.")
def counted_ends_need_pp(at: RuleContext) -> Iterator[Violation]:
    """With pp 1 one rank has all layers, so the setting has no effect."""
    p = at.spec.parallel
    for name, counted in (
        ("account_for_embedding_in_pipeline_split", p.account_for_embedding_in_pipeline_split),
        ("account_for_loss_in_pipeline_split", p.account_for_loss_in_pipeline_split),
    ):
        if counted and p.pp == 1:
            message = f"{name} has no effect: pp is 1"
            yield Violation(f"parallel.{name}", message, {"pp": 1}, ({f"parallel.{name}": False},), "warning")


@rule("parallel.balanced_ranks", "No pipeline rank has far more layers than the others.")
def balanced_ranks(at: RuleContext) -> Iterator[Violation]:
    """The slowest rank sets the step time, and the others wait for it."""
    p = at.spec.parallel
    if p.pp == 1 or at.stage_violations or at.spec.model.num_layers > MAX_LAYERS:
        return
    if p.pipeline_layout is None and not _has_ends(at):
        return
    layers = [0] * p.pp
    for stage in build_stages(at.spec):
        layers[stage.rank] += len(stage.layers) + len(stage.mtp)
    most, mean = max(layers), sum(layers) / p.pp
    if most >= mean + 2 and most > 1.5 * mean:
        yield Violation(
            "parallel.pipeline_layout" if p.pipeline_layout is not None else "parallel.pp",
            f"pp rank {layers.index(most)} has {most} layers, {mean:.4g} on average: the other ranks wait for it",
            {"most": most, "mean": round(mean, 3)},
            (_NO_LAYOUT, _EVEN),
            "warning",
        )


@rule("parallel.embedding_copies", "The embedding is on one pipeline rank.")
def embedding_copies(at: RuleContext) -> Iterator[Violation]:
    """A tied head and MTP depths use it too; ranks that replicate it all-reduce its gradients each step."""
    model, p = at.spec.model, at.spec.parallel
    if (
        p.pp == 1
        or at.stage_violations
        or model.num_layers > MAX_LAYERS
        or not (model.tie_word_embeddings or model.mtp.num_layers)
    ):
        return
    stages = build_stages(at.spec)
    ranks = {stages[0].rank: "the embedding"}
    for stage in stages:
        if stage.mtp:
            ranks.setdefault(stage.rank, "MTP")
        if stage.head and model.tie_word_embeddings:
            ranks.setdefault(stage.rank, "the tied head")
    if len(ranks) > 1:
        replicas = ", ".join(f"pp rank {rank} ({why})" for rank, why in ranks.items())
        yield Violation(
            "model.tie_word_embeddings" if model.tie_word_embeddings else "model.mtp.num_layers",
            f"the embedding is replicated on {replicas}; its gradients are all-reduced over them each step",
            {"ranks": sorted(ranks)},
            (),
            "note",
        )
