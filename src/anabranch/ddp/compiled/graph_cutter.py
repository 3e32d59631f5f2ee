"""Takes the place of the class by which torch cuts graphs for DDP, and compiles a graph in parts.

It imports the compiler, so it is imported in a model's first forward, not with the package.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch._dynamo.backends.distributed as torch_cutter
import torch._inductor.config as inductor_config
import torch.fx.passes.split_module as splitting
from torch import fx
from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from anabranch.ddp.compiled.cut_points import Cuts, operations
from anabranch.ddp.reducer import running_graph_cutter
from anabranch.values.dependencies import check_signatures

TESTED = "2.13.0"  # in CI; 2.11 and 2.15 by hand
SIGNATURES: tuple[tuple[object, Mapping[str, Sequence[str]]], ...] = (
    (
        torch_cutter,
        {
            "DDPOptimizer": ("bucket_bytes_cap", "backend_compile_fn"),
            "SubmodCompiler": ("module", "compiler", "fake_mode"),
            "propagate_metadata": ("orig_gm", "split_gm"),
            "propagate_dynamo_source": ("orig_gm", "split_gm"),
        },
    ),
    (torch_cutter.DDPOptimizer, {"compile_fn": ("gm", "example_inputs")}),
    (splitting, {"split_module": ("split_callback", "keep_original_order")}),
    (FakeTensorMode, {"from_tensor": ("static_shapes",)}),
)

CUDA_GRAPHS = (
    'CUDA graphs are recorded (mode="reduce-overhead" or the option "triton.cudagraphs"), so torch cuts by bytes and '
    'not where buckets end: the modes "default" and "max-autotune-no-cudagraphs" let the plan cut'
)

Compiled = Callable[..., Any]
Compiler = Callable[..., Compiled]


def install() -> None:
    """Have torch ask us where to cut graphs, from now on; RuntimeError if this torch cannot.

    Only graphs of a DataParallel that plans are cut by us. Torch looks the class up each time it compiles.
    """
    torch_class: Any = torch_cutter.DDPOptimizer
    if torch_class.__module__ == __name__:
        return
    for owner, signatures in SIGNATURES:
        check_signatures("torch", TESTED, owner, signatures)

    class PlannedCuts(torch_class):  # type: ignore[misc]
        """Cuts graphs of a DataParallel that plans where it says, and all others as torch does."""

        def compile_fn(self, gm: fx.GraphModule, example_inputs: list[Any], **options: Any) -> Any:
            compiler = partial(self.backend_compile_fn, **options)
            compiled: Compiled | None = None
            graphs = running_graph_cutter()  # a CompiledGraphs
            if graphs is not None and uses_cuda_graphs(self.backend_compile_fn):
                graphs.note(CUDA_GRAPHS)
            elif graphs is not None and not torch.is_grad_enabled():
                compiled = compiler(gm, example_inputs)  # there will be no backward in which gradients could leave
            elif graphs is not None:
                compiled = graphs.compile(gm, example_inputs, partial(compile_parts, compiler))
            return compiled if compiled is not None else super().compile_fn(gm, example_inputs, **options)

    torch_cutter.DDPOptimizer = PlannedCuts  # type: ignore[misc]


def compile_parts(
    compiler: Compiler, graph: fx.GraphModule, cuts: Cuts, inputs: Sequence[Any], again: bool
) -> Compiled:
    """Compile each part of a graph by itself; a function that runs them, one after the other.

    ``again``: torch has compiled this graph before, and the inputs are those of a call.
    """
    part_of = {node: bisect_right(cuts, position) for position, node in enumerate(operations(graph.graph))}
    split = splitting.split_module(graph, None, part_of.__getitem__, keep_original_order=True)  # type: ignore[arg-type]
    torch_cutter.propagate_dynamo_source(graph, split)
    torch_cutter.propagate_metadata(graph, split)
    fake_mode = None if again else detect_fake_mode(inputs)
    if fake_mode is None:
        fake_mode = FakeTensorMode(shape_env=ShapeEnv())
        inputs = [
            fake_mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value
            for value in inputs
        ]
    context = tracing(TracingContext(fake_mode)) if again else nullcontext()
    with context, _disable_saved_tensors_hooks_during_tracing():
        torch_cutter.SubmodCompiler(split, compiler, fake_mode).run(*inputs)
    split.recompile()
    return split


def uses_cuda_graphs(backend: Any) -> bool:
    """Whether a backend of torch.compile records CUDA graphs, by its mode, its options or the configuration."""
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    options = getattr(backend, "config", None)
    chosen = options.get("triton.cudagraphs") if isinstance(options, Mapping) else None
    return bool(inductor_config.triton.cudagraphs if chosen is None else chosen)
