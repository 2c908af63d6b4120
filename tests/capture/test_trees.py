"""Nested state comes back with value semantics, under names that never collide."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.capture import Frozen, PerRank, capture
from ftckpt.errors import (
    RestoreIncomplete,
    SettingsError,
    StateMismatch,
    UnsupportedValue,
    WorldSizeMismatch,
)
from ftckpt.plan.asked import Asked
from tests.capture.memory import contents, plan, restore, same_bits, save, specs, trees
from tests.test_values import keys, same, scalars


def deep_equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and same_bits(a, b)
    if isinstance(a, dict):
        return (
            type(a) is type(b)
            and len(a) == len(b)
            and all(
                same(k, m) and deep_equal(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
            )
        )
    if isinstance(a, (list, tuple, deque)):
        return type(a) is type(b) and len(a) == len(b) and all(map(deep_equal, a, b))
    return same(a, b)


tensors = st.sampled_from([torch.arange(3), torch.ones(2, 2, dtype=torch.bfloat16), torch.tensor(1.5)])
states = st.recursive(
    scalars | tensors,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=10,
)


@settings(max_examples=60)
@given(states, states)
def test_any_state_comes_back_whatever_was_live_before(value, before):
    """F4, F5, F8"""
    live = {"x": {"v": before}}
    try:
        restore(save({"x": {"v": value}}), live)
    except StateMismatch:
        return  # a tensor of another shape or dtype at the very same place is refused by name
    assert deep_equal(live["x"]["v"], value)


@settings(max_examples=60)
@given(states)
def test_a_component_of_any_kind_comes_back_into_an_empty_place(value):
    live = {"x": None}

    restore(save({"x": value}), live)

    assert deep_equal(live["x"], value)


def test_lists_and_dicts_whose_size_changed_equal_what_was_saved():
    """F4"""
    live = {"t": {"log": [], "d": {"x": 1}}}
    outer, log, inner = live["t"], live["t"]["log"], live["t"]["d"]

    restore(save({"t": {"log": [{"a": 1}, {"b": torch.ones(2)}], "d": {}}}), live)

    assert deep_equal(live["t"], {"log": [{"a": 1}, {"b": torch.ones(2)}], "d": {}})
    assert live["t"] is outer and outer["log"] is log and outer["d"] is inner


def test_plain_values_next_to_tensors_are_restored_with_their_types():
    """F5"""
    saved = save(
        {"t": {"w": torch.ones(2), "epoch": 20, "name": "y", "flag": True, "none": None, "t": (1, [2])}}
    )
    weight = torch.zeros(2)
    live = {"t": {"w": weight, "epoch": 0, "name": "x", "flag": False, "none": 0, "t": ()}}

    restore(saved, live)

    assert live["t"]["w"] is weight
    assert deep_equal(
        live["t"], {"w": torch.ones(2), "epoch": 20, "name": "y", "flag": True, "none": None, "t": (1, [2])}
    )


@pytest.mark.parametrize("before", [None, torch.Size([9]), (), [0]])
def test_a_torch_size_comes_back_as_one_wherever_it_stands(before):
    sizes = {"alone": torch.Size([1, 2]), "within": (torch.Size([3]), [torch.Size([])]), "w": torch.ones(2)}
    live = {"t": {"alone": before, "within": (before,), "w": torch.zeros(2)}, "c": before}

    restore(save({"t": sizes, "c": torch.Size([4])}), live)

    assert live["t"]["alone"] == (1, 2) and live["t"]["within"] == ((3,), [()]) and live["c"] == (4,)
    within = live["t"]["within"]
    found = [live["c"], live["t"]["alone"], within[0], within[1][0]]
    assert {type(size) for size in found} == {torch.Size} and type(within) is tuple


def test_a_number_that_is_a_component_is_replaced_in_the_state_itself():
    live = {"epoch": 0, "name": "", "lr": Frozen(0.0)}

    restore(save({"epoch": 3, "name": "x", "lr": Frozen(0.1)}), live)

    assert live["epoch"] == 3 and live["name"] == "x" and live["lr"].value == 0.1


def test_arrays_are_filled_in_place_when_they_fit_and_replaced_when_not():
    live = {"a": np.zeros(3), "b": np.zeros(2)}
    first = live["a"]

    restore(save({"a": np.arange(3.0), "b": np.arange(4)}), live)

    assert live["a"] is first and np.array_equal(first, np.arange(3.0))
    assert np.array_equal(live["b"], np.arange(4))


def test_live_arrays_that_share_memory_are_taken_apart():
    base = np.zeros(4)
    live = {"t": {"a": base[:3], "b": base[1:]}}

    restore(save({"t": {"a": np.arange(3.0), "b": np.arange(3.0) + 10}}), live)

    assert live["t"]["a"].tolist() == [0, 1, 2] and live["t"]["b"].tolist() == [10, 11, 12]


CLASHING = {
    "a.b": torch.tensor(1),
    "a": {"b": torch.tensor(2), "": torch.tensor(3)},
    "a/b": torch.tensor(4),
    "": {"": torch.tensor(5)},
    "%2F": torch.tensor(6),
    "0": torch.tensor(7),
    0: torch.tensor(8),
    1.5: torch.tensor(9),
    None: torch.tensor(10),
    "ünïcode @g0.0": torch.tensor(11),
    "x" * 300: torch.tensor(12),
    (1, "a"): torch.tensor(13),
    b"0": torch.tensor(14),
    "value": torch.tensor(15),
    "%n": torch.tensor(16),
}


def test_keys_that_look_like_each_other_or_like_names_never_collide():
    """F8"""
    clashing = {
        "t": CLASHING,
        "t.a": {"b": torch.tensor(17)},
        "t@g0.0": torch.tensor(18),
        "": {"k": torch.tensor(19)},
    }
    live = dict.fromkeys(clashing)

    saved = save(clashing, rng=False)
    restore(saved, live, rng=False)

    assert len(specs(saved)) == 19
    assert all(deep_equal(live[name], clashing[name]) for name in clashing)
    assert "t.a.b" in specs(saved) and "t.a%2Eb" in specs(saved)


def test_a_key_of_true_is_not_the_key_one():
    """F8"""
    live = {"t": {1: torch.tensor(0)}}

    restore(save({"t": {True: torch.tensor(5)}}), live)

    assert next(iter(live["t"])) is True


def test_names_come_in_order_and_each_component_has_one_value_leaf():
    leaves = capture({"b": {"w": torch.ones(1)}, "a": [torch.ones(1), 2]}, rng=False)

    named = [(leaf.holding.leaf.name, leaf.holding.leaf.kind) for leaf in leaves]
    assert named == [("a", "value"), ("a.0", "tensor"), ("b", "value"), ("b.w", "tensor")]


class Unknown:
    pass


@pytest.mark.parametrize(
    "state, leaf",
    [
        ({"buffer": {"a.b": [1, Unknown()]}}, "buffer.a%2Eb.1"),
        ({"buffer": Unknown()}, "buffer"),
        ({"buffer": {"m": torch.nn.Linear(1, 1)}}, "buffer.m"),
        ({"buffer": {"deep": {Unknown: 1}}}, "buffer.deep.(key"),
        ({"buffer": PerRank({"x": Unknown()})}, "buffer.x@g0.0"),
        ({"rng": 1}, "rng"),
        ({3: 1}, "3"),
        ({"t": {"g": torch.Generator()}}, "t.g"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_its_full_name(state, leaf):
    """E4"""
    with pytest.raises(UnsupportedValue) as refused:
        capture(state)

    assert refused.value.leaf.startswith(leaf)
    assert "nothing was written" in str(refused.value)


def test_a_cycle_is_refused():
    loop: dict = {"x": []}
    loop["x"].append(loop)

    with pytest.raises(UnsupportedValue, match=r"t\.x\.0: it contains itself"):
        capture({"t": loop})


class Buffer:
    """A foreign object: keeps what it is given, as replay buffers do."""

    def __init__(self, **content):
        self.content = content

    def state_dict(self):
        return self.content

    def load_state_dict(self, state):
        self.content = state


def test_an_object_is_given_memory_that_nothing_else_has():
    seen = torch.arange(4.0)
    saved = save({"buffer": Buffer(seen=seen, again=[seen], count=np.arange(3), log=[1])})
    before = Buffer(seen=torch.zeros(4), count=np.zeros(3))
    old = before.content
    trees_before = trees(saved)

    restore(saved, {"buffer": before})
    loaded = before.content
    loaded["seen"].fill_(-1)
    loaded["count"][:] = -1
    loaded["log"].append(2)

    assert torch.equal(loaded["again"][0], torch.arange(4.0))
    assert torch.equal(seen, torch.arange(4.0))
    assert not old["seen"].any() and not old["count"].any()
    assert same(trees(saved), trees_before)


def test_two_restores_from_the_same_records_share_nothing():
    saved = save({"t": {"log": [1], "a": np.zeros(2)}})
    read_once = trees(saved)
    from ftckpt.capture import target

    first, second = {"t": None}, {"t": None}
    for live in (first, second):
        target(live, specs(saved), read_once).finish()
    first["t"]["log"].append(2)
    first["t"]["a"][:] = 7

    assert second["t"]["log"] == [1] and not second["t"]["a"].any()
    assert read_once["t"]["tree"]["log"] == [1]


def test_planning_a_restore_changes_nothing_live():
    live = {"t": {"w": torch.zeros(3), "n": 1, "log": [1]}, "b": Buffer(x=torch.zeros(2))}
    before = contents(save(live))

    plan(save({"t": {"w": torch.ones(3), "n": 2, "log": []}, "b": Buffer(x=torch.ones(2))}), live)

    assert contents(save(live)) == before


def test_missing_and_extra_components_are_all_named_in_one_error():
    saved = save({"a": 1, "b": 2, "c": 3})

    with pytest.raises(StateMismatch) as refused:
        restore(saved, {"a": 0, "x": 0, "y": 0})

    assert [name.split()[0] for name in refused.value.missing] == ["x", "y"]
    assert [name.split()[0] for name in refused.value.extra] == ["b", "c"]
    for name in "xybc":
        assert f": {name} (" in str(refused.value)


def test_a_subset_leaves_the_rest_and_the_generators_alone():
    saved = save({"a": 1, "b": 2})
    torch.manual_seed(5)
    before = torch.get_rng_state()
    live = {"a": 0}

    aim = restore(saved, live, subset=True)

    assert live == {"a": 1} and aim.notes == ()
    assert torch.equal(torch.get_rng_state(), before)


def test_not_strict_says_what_it_let_pass():
    live = {"a": 0, "x": 7}

    aim = restore(save({"a": 1, "b": 2}), live, asked=Asked(strict=False))

    assert live == {"a": 1, "x": 7}
    assert any("not in the checkpoint: x" in note for note in aim.notes)
    assert any("not wanted here: b" in note for note in aim.notes)


def test_another_kind_of_component_is_refused():
    with pytest.raises(StateMismatch, match="saved as object, live is tree"):
        restore(save({"x": Buffer(a=1)}), {"x": {"a": 1}})


def test_a_long_list_of_differences_is_cut_in_the_text_and_whole_in_the_facts():
    with pytest.raises(StateMismatch, match="and 38 more") as refused:
        restore(save({}), {f"c{i}": i for i in range(50)})

    assert len(refused.value.missing) == 50


def test_an_object_that_refuses_its_state_is_named_with_all_that_come_after_it():
    class Sulky(Buffer):
        def load_state_dict(self, state):
            raise KeyError("no")

    with pytest.raises(RestoreIncomplete) as failed:
        restore(save({"a": 1, "b": Buffer(x=1), "c": Buffer(x=2)}), {"a": 0, "b": Sulky(), "c": Buffer()})

    assert failed.value.components == ("b", "c", "rng")
    assert isinstance(failed.value.__cause__, KeyError)


def test_frozen_marks_leaves_inside_and_is_restored_like_any_other():
    state = {"ref": Frozen({"w": torch.ones(2)}), "t": {"x": Frozen([torch.ones(1)]), "y": torch.ones(1)}}
    saved = save(state, rng=False)
    live = {"ref": Frozen({"w": torch.zeros(2)}), "t": {"x": Frozen([]), "y": torch.zeros(1)}}
    mark = live["t"]["x"]

    restore(saved, live, rng=False)

    frozen = {piece.leaf.name for piece in saved if piece.holding.frozen}
    assert frozen == {"ref", "ref.w", "t.x.0"}
    assert torch.equal(live["ref"].value["w"], torch.ones(2))
    assert live["t"]["x"] is mark and torch.equal(mark.value[0], torch.ones(1))


def per_rank_state(rank: int) -> dict:
    return {
        "common": {"n": 5, "mine": PerRank({"at": rank, "w": torch.tensor([rank])})},
        "loader": PerRank(Buffer(position=10 + rank, seen=torch.tensor([rank, rank]))),
        "seed": PerRank(rank * 7),
    }


def test_each_rank_gets_back_what_it_saved():
    """G5"""
    saved = [piece for rank in range(2) for piece in save(per_rank_state(rank), rank=rank, world=2)]
    live = per_rank_state(9)

    restore(saved, live, rank=1, world=2)

    assert live["common"]["mine"].value["at"] == 1
    assert live["common"]["mine"].value["w"].tolist() == [1]
    assert live["loader"].value.content["position"] == 11
    assert live["loader"].value.content["seen"].tolist() == [1, 1]
    assert live["seed"].value == 7
    mine = next(p for p in saved if p.leaf.name == "common.mine.w@g0.1")
    assert mine.leaf.owner == "g0.1" and mine.ranks == (1,) and not mine.holding.every_group
    assert {p.raw for p in saved if p.leaf.name == "common"} == {saved[0].raw}


@pytest.mark.parametrize("rank, world, group", [(0, 1, "g0"), (0, 3, "g0"), (0, 2, "g1")])
def test_per_rank_state_on_other_ranks_is_refused_before_anything_is_touched(rank, world, group):
    """G5, G6"""
    saved = [piece for rank in range(2) for piece in save(per_rank_state(rank), rank=rank, world=2)]
    live = per_rank_state(9)

    with pytest.raises(WorldSizeMismatch) as refused:
        restore(saved, live, rank=rank, world=world, group=group)

    assert "loader" in str(refused.value) and "g0.0, g0.1" in str(refused.value)
    assert live["loader"].value.content["position"] == 19


class Merging(Buffer):
    def reshard(self, states, *, group, rank, world):
        positions = sorted(state["position"] for state in states.values())
        self.content = {"position": positions, "seen": [state["seen"] for state in states.values()]}


def test_per_rank_state_on_other_ranks_is_merged_by_the_value_itself_when_asked():
    """G6"""
    saved = [
        piece
        for rank in range(2)
        for piece in save(
            {"l": PerRank(Buffer(position=rank, seen=torch.tensor([rank])))}, rank=rank, world=2
        )
    ]
    live = {"l": PerRank(Merging(), on_resize="merge")}

    aim = restore(saved, live)

    assert live["l"].value.content["position"] == [0, 1]
    assert [t.tolist() for t in live["l"].value.content["seen"]] == [[0], [1]]
    assert any("merged" in note for note in aim.notes)


def test_per_rank_state_on_other_ranks_is_left_alone_when_asked_and_said_so():
    """G6"""
    saved = [piece for rank in range(2) for piece in save({"l": PerRank(5)}, rank=rank, world=2)]
    live = {"l": PerRank(9, on_resize="reseed")}

    aim = restore(saved, live)

    assert live["l"].value == 9
    assert any("not restored" in note and "l:" in note for note in aim.notes)


def test_state_of_a_group_that_is_gone_is_not_passed_over():
    """G6: two groups saved, one restores: refused, merged, or, where it may begin anew, its own is taken."""
    saved = [
        piece
        for group, position in (("g0", 5), ("g1", 6))
        for piece in save({"l": PerRank(Buffer(position=position, seen=1))}, group=group)
    ]
    plain, merging = {"l": PerRank(Buffer())}, {"l": PerRank(Merging(), on_resize="merge")}
    begins_anew = {"l": PerRank(Buffer(), on_resize="reseed")}

    with pytest.raises(
        WorldSizeMismatch, match=r"l: saved by g0\.0, g1\.0; asked for by g0\.0 of 1 in 1 groups"
    ):
        restore(saved, plain, groups=1)
    for groups, live in ((2, plain), (None, {"l": PerRank(Buffer())}), (1, begins_anew)):
        restore(saved, live, groups=groups)
        assert live["l"].value.content["position"] == 5
    restore(saved, merging, groups=1)
    assert merging["l"].value.content["position"] == [5, 6]


def test_states_are_merged_in_the_order_of_their_ranks():
    """G6: ten comes after nine."""

    class Ordered(Merging):
        def reshard(self, states, *, group, rank, world):
            self.content = list(states)

    saved = [
        piece for rank in range(11) for piece in save({"l": PerRank(Buffer(at=rank))}, rank=rank, world=11)
    ]
    live = {"l": PerRank(Ordered(), on_resize="merge")}

    restore(saved, live)

    assert live["l"].value.content == [f"g0.{rank}" for rank in range(11)]


def test_a_policy_without_meaning_is_refused():
    with pytest.raises(SettingsError, match="sometimes"):
        PerRank(1, on_resize="sometimes")
    with pytest.raises(SettingsError, match="reshard"):
        PerRank(1, on_resize="merge")


@pytest.mark.parametrize("saved, live", [(PerRank(1), 0), (1, PerRank(0))])
def test_a_mark_on_one_side_only_is_refused(saved, live):
    with pytest.raises(StateMismatch, match="PerRank"):
        restore(save({"x": saved}), {"x": live})


def test_a_state_that_cannot_be_changed_refuses_values_that_must_be_replaced():
    from types import MappingProxyType

    with pytest.raises(StateMismatch, match="epoch"):
        restore(save({"epoch": 3}), MappingProxyType({"epoch": 0}))


def test_counters_and_deques_come_back():
    live = {"x": {"c": Counter(), "q": deque(maxlen=2)}}

    restore(save({"x": {"c": Counter({3: 1}), "q": deque([1, torch.ones(1)], maxlen=2)}}), live)

    assert live["x"]["c"] == Counter({3: 1}) and type(live["x"]["c"]) is Counter
    assert live["x"]["q"].maxlen == 2 and live["x"]["q"][0] == 1
