"""The units of a model that are recomputed as one: its repeated blocks, found by its containers."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

REST = ""  # the name of what is saved outside all units
END = "(end)"  # and of what is saved after the last unit, which backward begins with: the host is no place for that
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Unit:
    """One module, or a run of children of a Sequential, which goes by the name of the first.

    joins    it follows another unit of the same Sequential directly, so both can be recomputed as one
    """

    name: str
    module: nn.Module  # the one itself, or the Sequential
    children: tuple[str, ...] = ()
    joins: bool = False

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """The modules that it runs, in order."""
        return tuple(self.module.get_submodule(name) for name in self.children) or (self.module,)


def blocks_of(model: nn.Module) -> list[Unit]:
    """The units of ``model``, in the order of its modules: what repeats in its containers, else what it is made of.

    Children of a ModuleList are taken one by one. In a Sequential a layer without a matrix of its own, such as a norm,
    an activation or a pooling, belongs to the unit before it: it is cheap, and may change its input in place, which
    nothing can be recomputed from.
    """
    found = _inside(model, "") if isinstance(model, CONTAINERS) else _below(model, "")
    first: dict[tuple[int, tuple[str, ...]], Unit] = {}  # of a module that is used twice
    for unit in found:
        first.setdefault((id(unit.module), unit.children), unit)
    return list(first.values())


def _below(module: nn.Module, prefix: str) -> Iterator[Unit]:
    for name, child in module.named_children():
        path = prefix + name
        if isinstance(child, CONTAINERS):
            yield from _inside(child, path + ".")
        elif any(isinstance(inner, CONTAINERS) for inner in child.modules()):
            yield from _below(child, path + ".")
        elif any(True for _ in child.children()) and _has_parameters(child):
            yield Unit(path, child)


def _inside(container: nn.Module, prefix: str) -> Iterator[Unit]:
    runs = type(container).forward is nn.Sequential.forward
    start: str | None = None  # the first of the run that is open
    run: list[str] = []
    follows = False
    for name, child in container._modules.items():  # named_children() leaves out a layer that is used again
        if child is None:
            continue
        if _is_stage(child):
            if start is not None:
                yield Unit(prefix + start, container, tuple(run), follows)
            start, run, follows = None, [], False
            yield from _inside(child, f"{prefix}{name}.")
        elif not runs:
            if _has_parameters(child):
                yield Unit(prefix + name, child)
        elif start is None or _starts(child):
            if start is not None:
                yield Unit(prefix + start, container, tuple(run), follows)
                follows = True
            start, run = name, [name]
        else:
            run.append(name)
    if start is not None:
        yield Unit(prefix + start, container, tuple(run), follows)


def _is_stage(child: nn.Module) -> bool:
    """A container of blocks, not one of layers, which is a block itself."""
    parts = [part for part in child.children() if _has_parameters(part)]
    return (
        isinstance(child, CONTAINERS) and len(parts) > 1 and all(any(True for _ in part.children()) for part in parts)
    )


def _starts(child: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in child.parameters()) and not getattr(child, "inplace", False)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
