"""Which tensors of a language model are its word embeddings, by the names that models give them.

A config's ``tie_word_embeddings`` speaks of these and of no others, and only of these may be believed that
equal bytes mean one tensor. Knows names; refuses to know bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_INPUTS = frozenset(
    {"embed_tokens", "wte", "word_embeddings", "word_embedding", "shared", "tok_embeddings", "embed_in"}
)
_OUTPUTS = frozenset(
    {"lm_head", "embed_out", "proj_out", "output_projection", "vocab_projector", "generator_lm_head"}
)
_HEADS = frozenset({"predictions", "lm_head"})
"""Parts whose ``decoder`` is the output embedding."""


def is_input(name: str) -> bool:
    """Whether a parameter of that name is an input embedding."""
    *_, module, kind = ("", *name.split("."))
    return kind == "weight" and module in _INPUTS


def is_output(name: str) -> bool:
    """Whether a parameter of that name is the output embedding, or is called like one."""
    *_, outer, module, kind = ("", "", *name.split("."))
    if kind != "weight":
        return False
    return module in _OUTPUTS or (module == "decoder" and outer in _HEADS)


def made_by_the_model(names: Iterable[str], tied: Mapping[str, str]) -> set[str]:
    """The output embeddings that are one tensor with an input embedding: a model whose config ties them makes
    them itself. ``tied``: of names whose bytes are those of another, that other.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(tied.get(name, name), []).append(name)
    with_input = [group for group in groups.values() if any(map(is_input, group))]
    return {name for group in with_input for name in group if is_output(name)}
