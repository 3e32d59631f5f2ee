"""Chrome traces as torch.profiler writes them, made by hand: a GPU's, whose kernels end long after their launch."""

import json
from pathlib import Path
from typing import Any

PROFILE_US = 1000.0  # how long one step of ``cuda_profile`` takes on the host


def slice_of(name: str, kind: str, start: float, lasted: float, thread: int = 1, **args: Any) -> dict[str, Any]:
    """One event that lasts."""
    keys = {key.replace("_", " "): value for key, value in args.items()}
    return {"ph": "X", "cat": kind, "name": name, "pid": 7, "tid": thread, "ts": start, "dur": lasted, "args": keys}


def cuda_profile(steps: int = 3, shapes: bool = True, ddp: bool = False) -> dict[str, Any]:
    """Two gradients a step. Forward's kernel runs for 300 µs from 110 µs on, so the device lags behind the host.

    On the host a step's forward begins at 100, its backward at 200, and its gradients are accumulated at 240 and 280;
    on the device backward begins at 410, and the two kernels of backward end at 510 and 710.
    """
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {"name": "python"}}]
    for step in range(steps):
        at = PROFILE_US * step
        events += [
            slice_of("aten::mm", "cpu_op", at + 100, 20, Sequence_number=step, Fwd_thread_id=0),
            slice_of("cudaLaunchKernel", "cuda_runtime", at + 105, 5, correlation=10 * step + 1),
            slice_of("gemm", "kernel", at + 110, 300, 0, correlation=10 * step + 1, stream=7),
        ]
        for index, (start, lasted, begins, shape) in enumerate(((200, 100, 410, [4, 8]), (245, 200, 510, [8]))):
            known = {"Input_Dims": [shape], "Input_type": ["float"]} if shapes else {}
            node, launch = f"autograd::engine::evaluate_function: Mm{index}", 10 * step + 2 + index
            accumulate = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
            events += [
                slice_of(node, "cpu_op", at + start, 20, 2, Sequence_number=step, Fwd_thread_id=1),
                slice_of("cudaLaunchKernel", "cuda_runtime", at + start + 5, 5, 2, correlation=launch),
                slice_of("gemm", "kernel", at + begins, lasted, 0, correlation=launch, stream=7),
                slice_of(accumulate, "cpu_op", at + start + 25, 15, 2),
                slice_of("torch::autograd::AccumulateGrad", "cpu_op", at + start + 26, 10, 2, **known),
            ]
        if ddp:
            sent = {"Collective_name": "allreduce", "In_msg_nelems": 40, "dtype": "Float"}
            events += [
                slice_of("record_param_comms", "cpu_op", at + 282, 3, 2, **sent),
                slice_of("cudaLaunchKernel", "cuda_runtime", at + 283, 1, 2, correlation=10 * step + 9),
                slice_of(
                    "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", at + 710, 200, 0, correlation=10 * step + 9
                ),
            ]
    device = {"id": 0, "name": "NVIDIA H200"}
    return {"schemaVersion": 1, "deviceProperties": [device], "distributedInfo": {"rank": 0, "world_size": 4},
            "traceEvents": events}  # fmt: skip


def written(document: Any, folder: Path) -> Path:
    """A document as a file."""
    path = folder / "profile.json"
    path.write_text(json.dumps(document))
    return path
