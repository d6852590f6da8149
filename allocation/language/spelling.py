"""Tree to text, sizes to tree: the only module that spells allocations."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from allocation.language.syntax import LETTERS, Allocation, Dim, GpuRange, Group, Layout, Member


def spell(node: Allocation | Member | Layout, *, shell: bool = False) -> str:
    """Return the text of a node, which parses to an equal one.

    `shell` avoids the parentheses of folded layouts; `|` between members remains.
    """
    if isinstance(node, Allocation):
        return "+".join("|".join(spell(member, shell=shell) for member in group.members) for group in node.groups)
    if isinstance(node, Layout):
        attn, ffn = ("".join(map(str, dims)) for dims in (node.attn, node.ffn or ()))
        return attn if node.ffn is None else f"attn:{attn}/ffn:{ffn}" if shell else f"(attn:{attn}|ffn:{ffn})"
    name = f"[{node.name}]" if node.name else ""
    gpus = "@" + ",".join(map(str, node.gpus)) if node.gpus else ""
    return f"{node.backend}{name}:{spell(node.layout, shell=shell)}{gpus}"


def normalise(tree: Allocation) -> Allocation:
    """Return the same allocation with the letters in the published order, `d p t c e v`, and counts without leading
    zeros."""
    return Allocation(tuple(Group(tuple(map(_normalise_member, group.members))) for group in tree.groups))


def _normalise_member(member: Member) -> Member:
    def order(dims: Iterable[Dim]) -> tuple[Dim, ...]:
        plain = (replace(dim, count=dim.count.lstrip("0") or dim.count) for dim in dims)
        return tuple(sorted(plain, key=lambda dim: LETTERS.find(dim.letter)))

    old = member.layout
    return replace(member, layout=Layout(order(old.attn), None if old.ffn is None else order(old.ffn), old.span))


def dims(sizes: Mapping[str, int]) -> tuple[Dim, ...]:
    """Return dimensions by letter; of the sizes that are 1, only `d` is written."""
    return tuple(Dim(letter, str(size)) for letter, size in sizes.items() if size > 1 or letter == "d")


def gpu_ranges(gpus: Iterable[range]) -> tuple[GpuRange, ...]:
    """Return GPU ids as `@` writes them."""
    return tuple(GpuRange(str(ids.start), str(ids.stop - 1)) for ids in gpus)
