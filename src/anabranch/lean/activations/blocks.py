"""The blocks of a model: its repeated parts, found by its containers, each of which gets one action as a whole."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

REST = ""  # the name of what is saved outside all blocks
END = "(end)"  # the name of what is saved after the last block: backward begins with it
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class ModuleBlock:
    """One module, or consecutive children of a Sequential, which go by the name of the first.

    joins    it directly follows another block of the same Sequential, so both can be recomputed in one run
    """

    name: str
    module: nn.Module  # the block itself, or the Sequential whose children it has
    children: tuple[str, ...] = ()
    joins: bool = False

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that it runs, in order."""
        return tuple(self.module.get_submodule(name) for name in self.children) or (self.module,)


def blocks_of(model: nn.Module) -> list[ModuleBlock]:
    """Return the blocks of ``model`` in the order of its modules: what repeats in its containers, else its children.

    Children of a ModuleList are blocks one by one. In a Sequential a layer without a matrix of its own, such as a norm,
    an activation or a pooling, belongs to the block before it: it is cheap, and may change its input in place, from
    which nothing could be recomputed.
    """
    found = _of_container(model, "") if isinstance(model, CONTAINERS) else _of_children(model, "")
    first_use: dict[tuple[int, tuple[str, ...]], ModuleBlock] = {}  # a module may be used twice
    for block in found:
        first_use.setdefault((id(block.module), block.children), block)
    return list(first_use.values())


def _of_children(module: nn.Module, prefix: str) -> Iterator[ModuleBlock]:
    for name, child in module.named_children():
        path = prefix + name
        if isinstance(child, CONTAINERS):
            yield from _of_container(child, path + ".")
        elif any(isinstance(inner, CONTAINERS) for inner in child.modules()):
            yield from _of_children(child, path + ".")
        elif any(True for _ in child.children()) and _has_parameters(child):
            yield ModuleBlock(path, child)


def _of_container(container: nn.Module, prefix: str) -> list[ModuleBlock]:
    is_sequential = type(container).forward is nn.Sequential.forward
    found: list[ModuleBlock] = []
    is_open = False  # whether the last block may get more children
    for name, child in container._modules.items():  # named_children() leaves out a layer that is used again
        if child is None:
            continue
        if _is_stage(child):
            found += _of_container(child, f"{prefix}{name}.")
            is_open = False
        elif not is_sequential:
            if _has_parameters(child):
                found.append(ModuleBlock(prefix + name, child))
        elif not is_open or _starts_block(child):
            found.append(ModuleBlock(prefix + name, container, (name,), joins=is_open))
            is_open = True
        else:
            found[-1] = replace(found[-1], children=(*found[-1].children, name))
    return found


def _is_stage(child: nn.Module) -> bool:
    """Whether it is a container of blocks. A container of layers is a block itself."""
    parts = [part for part in child.children() if _has_parameters(part)]
    return (
        isinstance(child, CONTAINERS) and len(parts) > 1 and all(any(True for _ in part.children()) for part in parts)
    )


def _starts_block(child: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in child.parameters()) and not getattr(child, "inplace", False)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
