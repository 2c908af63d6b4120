"""Rules that rename: pure functions of names, and of saved structures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.capture.relabel import relabel
from ftckpt.errors import SettingsError, StateMismatch
from ftckpt.leaf import is_in
from ftckpt.plan.asked import asked, can_carry_over, casts, loses, renames
from ftckpt.values import TensorRef

PARTS = st.sampled_from(["a", "b", "ab", "module", "_orig_mod", "0"])
NAMES = st.lists(PARTS, min_size=2, max_size=5).map(".".join)
SIDES = st.lists(PARTS, min_size=1, max_size=3).map(".".join)


def named(rules: dict[str, str], name: str) -> str:
    return renames(rules).of(name)[0]


def module(*paths: str, of: str = "a") -> dict:
    return {"kind": "module", "tree": {path: TensorRef(f"{of}.{path}") for path in paths}}


def relabelled(trees: dict, rules: dict[str, str], *, idle: bool = False) -> dict:
    return dict(relabel(trees, renames(rules), idle=idle, untouched="rng").trees)


@pytest.mark.parametrize(
    ("rules", "saved", "here"),
    [
        ({"actor": "policy"}, "actor.0.weight", "policy.0.weight"),
        ({"actor": "policy"}, "actors.0.weight", "actors.0.weight"),
        ({"actor.old.": "actor.new."}, "actor.old.bias", "actor.new.bias"),
        ({"actor": "p", "actor.head": "critic.head"}, "actor.head.bias", "critic.head.bias"),
        ({"a": "b", "b": "c"}, "a.w", "b.w"),  # once, never in a chain
        ({"module.": ""}, "actor.module.0.weight", "actor.0.weight"),
        ({"module.": ""}, "actor.module.module.weight", "actor.module.weight"),
        ({"module.": ""}, "actor.layers.module.weight", "actor.layers.module.weight"),
        ({"module.": ""}, "actor.module", "actor.module"),
        ({"_orig_mod.": ""}, "actor._orig_mod.0._orig_mod.weight", "actor.0.weight"),
        ({"_orig_mod.": "", "module.": ""}, "actor._orig_mod.module.0.weight", "actor.0.weight"),
        ({"_fsdp_wrapped_module.": ""}, "m._fsdp_wrapped_module.h.0._fsdp_wrapped_module.w", "m.h.0.w"),
        ({"base_model.model": ""}, "actor.base_model.model.w", "actor.w"),
        ({"module.": "", "actor.head": "actor.top"}, "actor.module.head.w", "actor.top.w"),
    ],
)
def test_a_rule_renames_what_it_names_and_what_is_in_it(rules, saved, here):
    assert named(rules, saved) == here


@given(NAMES, st.dictionaries(SIDES, SIDES, max_size=4))
def test_a_name_follows_the_longest_rule_that_fits_or_none(name, rules):
    fitting = [left for left in rules if name == left or name.startswith(f"{left}.")]

    here = named(rules, name)

    longest = max(fitting, key=len, default="")
    assert here == (rules[longest] + name[len(longest) :] if fitting else name)


@given(st.sets(NAMES, max_size=8), SIDES, SIDES)
def test_a_rule_and_its_opposite_lead_back(names, left, right):
    """Where the first collides with nothing."""
    touched = {name for name in names if is_in(name, left)}

    there = {name: named({left: right}, name) for name in touched}

    assert {name: named({right: left}, here) for name, here in there.items()} == {
        name: name for name in touched
    }


@given(st.sets(NAMES, min_size=1, max_size=8), st.dictionaries(SIDES, SIDES | st.just(""), max_size=3))
def test_no_tensor_is_lost_or_doubled_or_all_is_refused(names, rules):
    """Whatever the rules: each saved tensor stands at one place, which is where its name leads."""
    trees: dict = {}
    for name in names:
        component, _, path = name.partition(".")
        record = trees.setdefault(component, {"kind": "module", "tree": {}})
        record["tree"][path] = TensorRef(name)

    try:
        found = relabelled(trees, rules, idle=True)
    except (SettingsError, StateMismatch):
        return

    places = [
        (f"{c}.{path}", ref.name) for c, record in found.items() for path, ref in record["tree"].items()
    ]
    assert sorted(saved for _, saved in places) == sorted(names)
    assert all(place == named(rules, saved) for place, saved in places)


@given(
    st.dictionaries(st.text(max_size=4) | st.integers(), st.integers() | st.lists(st.integers()), max_size=5)
)
def test_nested_values_that_no_rule_fits_stay_what_they_are(value):
    trees = {"box": {"kind": "tree", "tree": value}, "x": module("w", of="x")}

    found = relabelled(trees, {"x": "y"})

    assert found["box"] == trees["box"]
    assert list(found["y"]["tree"]) == ["w"]


def test_entries_go_from_one_module_to_another():
    found = relabelled({"actor": module("w", "head.w", of="actor")}, {"actor.head": "critic.top"})

    assert found["critic"]["tree"] == {"top.w": TensorRef("actor.head.w")}
    assert found["actor"]["tree"] == {"w": TensorRef("actor.w")}


def test_an_optimizer_follows_the_names_of_its_parameters():
    tree = {
        "state": {"actor.module.w": {"step": TensorRef("optim.state.actor.module.w.step")}},
        "other": {},
        "param_groups": [{"lr": 1.0, "params": ["actor.module.w", "actor.module.b"]}],
    }
    trees = {
        "actor": module("module.w", "module.b", of="actor"),
        "optim": {"kind": "optimizer", "tree": tree},
    }

    found = relabelled(trees, {"module.": "", "actor": "policy", "optim": "adam"})

    assert found["adam"]["tree"]["state"] == {
        "policy.w": {"step": TensorRef("optim.state.actor.module.w.step")}
    }
    assert found["adam"]["tree"]["param_groups"] == [{"lr": 1.0, "params": ["policy.w", "policy.b"]}]
    assert set(found["policy"]["tree"]) == {"w", "b"}


@pytest.mark.parametrize(
    "tree",
    [3, {"state": 1, "param_groups": []}, {"state": {}, "param_groups": 1}]
    + [{"state": {}, "param_groups": [group]} for group in (1, {}, {"params": 1}, {"params": [1]})],
)
def test_an_optimizer_that_no_writer_makes_is_left_to_whoever_refuses_it(tree):
    record = {"kind": "optimizer", "tree": tree}

    assert relabelled({"optim": record, "a": module("w")}, {"a": "b"})["optim"] == record


def test_keys_of_nested_values_get_other_names_where_they_are():
    """A dotted key is what a state_dict has; a name of several parts may also be keys inside keys."""
    value = {"module.0.w": TensorRef("sd.module%2E0%2Ew"), "opts": {"old": 1, 2: 3}, "list": [{"old": 4}]}

    found = relabelled(
        {"sd": {"kind": "tree", "tree": value}},
        {"module.": "", "sd.opts.old": "sd.opts.new", "sd.list.0.old": "sd.list.0.x"},
    )

    assert found["sd"]["tree"] == {
        "0.w": TensorRef("sd.module%2E0%2Ew"),
        "opts": {"new": 1, 2: 3},
        "list": [{"x": 4}],
    }


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"a.x": "a.y"}, "two things would be a.y here\n.*saved as: a.[xy]; and as: a.[xy]"),
        ({"a": "b"}, "two things would be b.w here"),
        ({"nothing.here": "a"}, "could apply 'nothing.here' to"),
        ({"a.x": "z"}, "cannot make a.x into z"),
        ({"t.k": "u.k"}, "cannot make t.l? into|cannot make t.[kl] into"),
        ({"t": "a"}, "two things would be a here|two things would be a"),
    ],
)
def test_what_collides_or_fits_nothing_or_has_no_place_is_refused_by_name(rules, words):
    trees = {
        "a": module("x", "y", "w"),
        "b": module("w", of="b"),
        "t": {"kind": "tree", "tree": {"k": 1, "l": 2}},
    }

    with pytest.raises(StateMismatch, match=f"(?s){words}"):
        relabelled(trees, rules)


@pytest.mark.parametrize(
    "rules",
    [
        [("a", "b"), ("a.", "c")],
        [("a", "b", "c")],
        ["ab"],
        {"": "a"},
        {"a..b": "c"},
        {"a": ".b"},
        {"a@g0.0": "b"},
        {"module": "", "module.inner": ""},
    ],
)
def test_rules_that_mean_nothing_or_two_things_are_refused(rules):
    with pytest.raises(SettingsError, match="rename="):
        renames(rules)


def test_a_dtype_is_asked_for_by_the_longest_name():
    rules = casts({"actor": "bfloat16", "actor.norm": "torch.float32"})

    assert [rules.of(n) for n in ("actor.w", "actor.norm.w", "critic.w")] == ["bfloat16", "float32", None]
    assert casts("float16").of("anything") == "float16"


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bool", "double", 3, {"a": "int32"}])
def test_only_dtypes_that_values_can_be_carried_over_to_are_taken(dtype):
    with pytest.raises(SettingsError, match="dtype="):
        asked(dtype=dtype)


def test_what_is_lost_between_dtypes_is_known():
    exact = {(a, b) for a in ("bfloat16", "float16", "float32", "float64") for b in ("float32", "float64")}

    assert not any(loses(a, b) for a, b in exact - {("float64", "float32")})
    assert all(
        loses(*pair) for pair in [("float64", "float32"), ("bfloat16", "float16"), ("float16", "bfloat16")]
    )
    assert can_carry_over("complex64", "complex128")
    assert not can_carry_over("complex64", "float64")
    assert not can_carry_over("int64", "float64")


@pytest.mark.parametrize("only", [[], "", [""], [3]])
def test_only_names_something(only):
    with pytest.raises(SettingsError, match="only="):
        asked(only=only)
