"""What a commit holds, and the records of as much of it as somebody wants.

A commit that lists its leaves tells which there are; then only those fragments are read that can hold what
is asked for, each once. One that does not, as commits of a single fragment and of earlier versions, is known
by all of its fragments. Knows records; refuses to know tensors and what a leaf is for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ftckpt.boxes import whole
from ftckpt.errors import RecordCorrupt
from ftckpt.leaf import LeafSpec
from ftckpt.manifest import Commit, Fragment, FragmentRef
from ftckpt.plan.listing import Want, is_listed, owned_by, relevant, specs_of, values_of
from ftckpt.reader import DEFAULT, ReadSettings, leaf_specs, read_refs, read_values
from ftckpt.store.api import ObjectStore


@dataclass(slots=True, eq=False)
class Contents:
    """The leaves of a commit. ``specs``: those of all ranks by name, and those of single ranks as far as
    their fragments were read; ``values``: the names of all value leaves, of single ranks too.
    """

    commit: Commit
    specs: dict[str, LeafSpec]
    values: Sequence[str]
    _store: ObjectStore
    _settings: ReadSettings
    _read: dict[str, Fragment] = field(default_factory=dict)

    def fragments(self, wants: Collection[Want]) -> list[Fragment]:
        """Those that can hold a part of what is wanted, in the commit's order.

        Raises:
            ObjectDamaged: one of them is absent, or not the one that was committed.
            RecordCorrupt: one of them says of a leaf what the commit does not.
        """
        refs = relevant(self.commit, wants)
        self._learn(refs)
        return [self._read[ref.key] for ref in refs]

    def know(self, owners: Collection[str]) -> None:
        """Read what there is of these owners, so that ``specs`` has their leaves."""
        self._learn(owned_by(self.commit, owners))

    def packed(self, names: Collection[str]) -> dict[str, bytes]:
        """The packed bytes of these value leaves, by name.

        Raises:
            RecordCorrupt: the commit lists one that its fragments do not have.
        """
        self.know({owner for name in names if (owner := name.rpartition("@")[2]) != name})
        leaves = [self._value(name) for name in names]
        fragments = self.fragments([(leaf, whole(leaf.shape)) for leaf in leaves])
        return read_values(self._store, fragments, self.commit.at, self._settings, leaves)

    def _value(self, name: str) -> LeafSpec:
        leaf = self.specs.get(name)
        if leaf is None or leaf.kind != "value":
            raise RecordCorrupt(
                f"RecordCorrupt: {self.commit.at} lists the values {name!r}, and its fragments have none",
                leaf=name,
                step=self.commit.step,
            )
        return leaf

    def _learn(self, refs: Iterable[FragmentRef]) -> None:
        new = [ref for ref in refs if ref.key not in self._read]
        for ref, fragment in zip(new, read_refs(self._store, self.commit.at, new), strict=True):
            self._compare(fragment, ref.key)
            self._read[ref.key] = fragment

    def _compare(self, fragment: Fragment, key: str) -> None:
        for leaf in fragment.leaves:
            known = self.specs.get(leaf.name)
            if known is None and leaf.owner:
                self.specs[leaf.name] = leaf.spec
            elif (
                known is None
                or leaf.shape != known.shape
                or (leaf.kind, leaf.dtype, leaf.owner) != (known.kind, known.dtype, known.owner)
            ):
                raise RecordCorrupt(
                    f"RecordCorrupt: {key} holds {leaf.spec}\n"
                    f"  what else is said of it in {self.commit.at}: {known or 'nothing'}",
                    leaf=leaf.name,
                    step=self.commit.step,
                    key=key,
                )


def contents(store: ObjectStore, commit: Commit, settings: ReadSettings = DEFAULT) -> Contents:
    """Of a commit that lists no leaves all fragments are read now, else nothing is."""
    if is_listed(commit):
        return Contents(commit, specs_of(commit), values_of(commit), store, settings)
    fragments = read_refs(store, commit.at, commit.fragments)
    specs = leaf_specs(fragments)
    values = [leaf.name for leaf in specs.values() if leaf.kind == "value"]
    read = {ref.key: fragment for ref, fragment in zip(commit.fragments, fragments, strict=True)}
    return Contents(commit, specs, values, store, settings, read)
