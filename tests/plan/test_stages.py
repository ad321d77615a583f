"""Which layers a stage holds: even, uneven and written-out divisions, and every reason against one."""

import pytest

from megalaunch.plan.pipeline_layout import PipelineLayoutError, expand_layout
from megalaunch.plan.stage_validation import PipelineSplit, find_stage_violations
from megalaunch.plan.stages import StageError, assign_layers

EVEN = {
    "layers": 8,
    "mtp": 0,
    "pp": 1,
    "vpp": None,
    "first": None,
    "last": None,
    "embedding_counts": False,
    "head_counts": False,
    "layout": None,
    "v_shaped": False,
}


def layers(**values):
    return [len(stage.layers) for stage in assign_layers(PipelineSplit(**EVEN | values))]


def rules(**values):
    return [fault.rule.partition(".")[2] for fault in find_stage_violations(PipelineSplit(**EVEN | values))]


def test_even_shares_in_pipeline_order():
    stages = assign_layers(PipelineSplit(**EVEN | {"pp": 2, "vpp": 2, "mtp": 1}))
    assert [(s.rank, s.chunk, s.layers) for s in stages] == [
        (0, 0, (0, 1)),
        (1, 0, (2, 3)),
        (0, 1, (4, 5)),
        (1, 1, (6, 7)),
    ]
    assert [s.embedding for s in stages] == [True, False, False, False]
    assert [s.head for s in stages] == [False, False, False, True]
    assert [s.mtp for s in stages] == [(), (), (), (0,)]


def test_a_v_runs_back():
    stages = assign_layers(PipelineSplit(**EVEN | {"pp": 2, "vpp": 2, "v_shaped": True}))
    assert [(s.rank, s.chunk) for s in stages] == [(0, 0), (1, 0), (1, 1), (0, 1)]
    assert layers(pp=2, vpp=2, v_shaped=True, first=2) == [1, 3, 3, 1]


def test_embedding_and_head_count_as_layers():
    """Llama-3.1-405B: 126 layers on 8 stages."""
    assert layers(layers=126, pp=8, embedding_counts=True, head_counts=True) == [15, *[16] * 6, 15]
    both = {"embedding_counts": True, "head_counts": True}
    assert layers(layers=126, pp=8, vpp=2, **both) == [7, *[8] * 14, 7]
    assert layers(layers=7, pp=2, head_counts=True) == [4, 3]
    assert layers(pp=1, **both) == [8]


def test_uneven_ends():
    assert layers(pp=4, first=1, last=1) == [1, 3, 3, 1]
    assert layers(pp=4, last=2) == [2, 2, 2, 2]
    assert layers(pp=3, vpp=2, first=4) == [2, 1, 1, 2, 1, 1]
    assert layers(pp=2, first=5, last=3) == [5, 3]
    assert layers(pp=3, first=0) == [0, 4, 4]


def test_a_layout_in_letters():
    """DeepSeek-V3: 61 layers and one MTP depth on 16 ranks of two stages."""
    deepseek = "Et*3|(tt|)*29m|L"
    stages = assign_layers(PipelineSplit(**EVEN | {"layers": 61, "mtp": 1, "pp": 16, "layout": deepseek}))
    assert [len(s.layers) for s in stages] == [3, *[2] * 29, 0, 0]
    assert [s.mtp for s in stages] == [*[()] * 30, (0,), ()]
    assert stages[-1].head
    assert (stages[30].rank, stages[30].chunk) == (14, 1)


@pytest.mark.parametrize(
    ("layout", "written"),
    [
        ("EttL", ["EttL"]),
        ("E|t*2|L", ["E", "tt", "L"]),
        ("E|(t|)*3,L", ["E", "t", "t", "t", "L"]),
        ("((t|)*2E|)*2", ["t", "t", "E", "t", "t", "E", ""]),
    ],
)
def test_repeats_are_written_out(layout, written):
    assert list(expand_layout(layout)) == written


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("", "is empty"),
        ("E(t", r"\( without \)"),
        ("Et)L", r"\) without \( at letter 3"),
        ("EdL", "'d' at letter 2"),
        ("Et*L", "needs a count"),
        ("Et*0L", "needs a count"),
        ("E*", "needs a count"),
        ("*3", r"'\*' at letter 1"),
        ("((t*999)*999)*999", "more than 200000 letters"),
        ("(" * 20 + "t" + ")" * 20, "more than 16 nested parentheses"),
    ],
)
def test_what_is_no_layout(layout, reason):
    with pytest.raises(PipelineLayoutError, match=reason):
        expand_layout(layout)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"pp": 3}, ["layers_by_pp"]),
        ({"pp": 4, "embedding_counts": True}, ["layers_by_pp"]),
        ({"pp": 2, "vpp": 3}, ["layers_by_vpp"]),
        ({"vpp": 2}, ["vpp_needs_pp"]),
        ({"layout": "Et*4|t*4L"}, ["vpp_needs_pp"]),
        ({"pp": 2, "first": 1, "head_counts": True}, ["one_division"]),
        ({"first": 8}, ["uneven_needs_pp"]),
        ({"pp": 4, "first": 1}, ["uneven_rest"]),
        ({"pp": 3, "first": 4, "last": 4}, ["uneven_rest"]),
        ({"pp": 2, "first": 9}, ["uneven_rest"]),
        ({"pp": 2, "vpp": 2, "first": 3, "last": 5}, ["layers_by_vpp"] * 2),
        ({"pp": 3, "vpp": 2, "first": 2}, ["layers_by_vpp"]),
        ({"layout": "Et*8?"}, ["layout_grammar"]),
        ({"layout": "Et*8L", "last": 1}, ["one_division"]),
        ({"layout": "Et*4|t*4L", "pp": 3}, ["layout_by_pp"]),
        ({"layout": "Et*4|t*4L", "pp": 2, "vpp": 2}, ["layout_by_vpp"]),
        ({"layout": "Et*4|Et*4L", "pp": 2}, ["layout_ends"]),
        ({"layout": "t*4E|t*4L", "pp": 2}, ["layout_ends"]),
        ({"layout": "Et*4|t*3L", "pp": 2}, ["layout_layers"]),
        ({"layout": "Et*4|t*4mL", "pp": 2}, ["layout_mtp"]),
        ({"layout": "Et*4|mt*4L", "pp": 2, "mtp": 1}, ["layout_mtp_place"]),
        ({"layout": "Et*4|t*4m|mL", "pp": 3, "mtp": 2}, ["layout_mtp_place"]),
        ({"layout": "Et*7|tm|L|", "pp": 2, "mtp": 1}, ["layout_ends", "layout_mtp_place"]),
        ({"layout": "Et*4|t*4|m|L", "pp": 2, "mtp": 1}, ["layout_mtp_place"]),
    ],
)
def test_every_reason_has_its_rule(values, expected):
    assert rules(**values) == expected
    with pytest.raises(StageError):
        assign_layers(PipelineSplit(**EVEN | values))


def test_what_cannot_be_listed_is_refused():
    assert rules(layers=10**12, pp=2) == []
    with pytest.raises(StageError, match="more than the 100000"):
        assign_layers(PipelineSplit(**EVEN | {"layers": 10**12, "pp": 2}))
