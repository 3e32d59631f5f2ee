"""The plan cache of one training: its key, and rank 0's cached choice on every rank."""

import os
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from itertools import groupby

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from anabranch.exchange.agreement import from_all_ranks, from_rank_0, true_on_all_ranks
from anabranch.exchange.collectives import Collectives
from anabranch.exchange.interface import Group
from anabranch.exchange.model_parameters import model_parts
from anabranch.observe.environment import lab_note, network_note
from anabranch.observe.step_timer import tensors_in
from anabranch.tuning.cache_files import CachedChoice, CacheKey, Entry, log, plan_cache
from anabranch.tuning.candidates import warm_up_kinds
from anabranch.tuning.options import TuningOptions
from anabranch.tuning.trial import Trial
from anabranch.values.errors import PlanError
from anabranch.values.files import dumps, plain
from anabranch.values.kinds.names import DENSE, two_level
from anabranch.values.network import Network
from anabranch.values.trace import Trace
from anabranch.values.version import __version__


class TrainingCache:
    """Reads and writes the choice of one training. Rank 0's files count: other ranks open none.

    settings     lines with the settings that are not in ``options``
    parameters   those whose gradients are averaged, by name
    group        sends gradients; no reference to it is kept
    """

    def __init__(
        self,
        options: TuningOptions,
        settings: Sequence[str],
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        collectives: Collectives,
        group: Group,
    ) -> None:
        self._files = plan_cache(options.cache) if dist.get_rank(group) == 0 else None
        self._options = options
        self._settings = settings
        self._module_name = type(module).__name__
        self._model_lines = [f"{name} {part}" for name, part in model_parts(module).items()]
        self._parameters = parameters
        self._collectives = collectives
        self._ranks = dist.get_world_size(group)
        self._training_lines = key_lines(options, self._ranks, dist.get_backend(group))
        self._input: str | None = None
        self._newest_input: str | None = None  # the line of its key
        self._key: CacheKey | None = None
        self._hardware: list[str] = []

    def note_input(self, *inputs: object) -> None:
        """Call this with the inputs of each differentiated forward: the first ones show the batch size."""
        if self._input is None and (tensors := tensors_in(inputs)):  # such as "32x128 int64"
            shape, dtype = "x".join(map(str, tensors[0].shape)), str(tensors[0].dtype).removeprefix("torch.")
            self._input = f"{shape} {dtype}"

    @property
    def newest_fits(self) -> bool:
        """Whether the newest choice, if there was one, is for the batch of this rank's first forward."""
        return self._newest_input in (None, f"input {self._input}")

    def read(self, control: Group, max_lanes: int, any_input: bool = False) -> CachedChoice | None:
        """Rank 0's cached choice, on every rank, or None on all of them. Collective on ``control``, after a forward.

        ``any_input``: before the first forward, when the batch is not known, the newest choice for any batch. A choice
        that needs more than ``max_lanes`` lanes, or does not fit the parameters of some rank, is ignored.
        """
        key = self._key = self._complete_key(control)
        check = partial(self._check, max_lanes=max_lanes)
        entry = None
        if self._files is not None and any_input:
            entry = self._files.newest(key, check)
        elif self._files is not None and (choice := self._files.read(key, check)) is not None:
            entry = Entry(key, choice)
        text = from_rank_0(entry.text() if entry is not None else None, control)
        if not text:
            return None
        if (rank := dist.get_rank(control)) != 0:
            try:
                entry = Entry.of(text, "the cached plan of rank 0")
                check(entry.choice)
            except Exception as error:  # this rank must still take part in the answer
                words = plain(str(error))
                log.warning("anabranch: the plan cache ignores the cached plan of rank 0, on rank %d: %s", rank, words)
                entry = None
        if not true_on_all_ranks(entry is not None, control) or entry is None:
            return None
        if any_input:
            self._newest_input = entry.key.input
        return entry.choice

    def _complete_key(self, control: Group) -> CacheKey:
        device = next(iter(self._parameters.values())).device
        self._hardware = self._hardware or hardware_lines(device, control)
        training = (*self._training_lines, *self._hardware, *self._settings, *self._model_lines)
        return CacheKey(self._module_name, f"input {self._input}", training, tuple(version_lines(device)))

    def write(
        self,
        kept: Trial,
        default_step_s: float,
        network: Network | None,
        trace: Trace | None,
        parts: Sequence[Sequence[str]] | None,
    ) -> None:
        """Have rank 0 keep this choice with its measured steps; other ranks do nothing. Not collective, never raises.

        ``default_step_s`` is the median step under the layout's own buckets. Call ``read`` before, since it completes
        the key. A choice without a measured network is not kept: it was made without a search, and is soon made again.
        """
        if self._files is None or self._key is None or network is None or trace is None:
            return
        today, cuts = datetime.now(UTC).date().isoformat(), tuple(map(tuple, parts)) if parts is not None else None
        try:
            low_s, step_s, high_s = (float(value) for value in np.percentile(kept.steps_s, [25, 50, 75]))
            choice = CachedChoice(
                label=kept.label, step_s=step_s, spread_s=high_s - low_s, default_step_s=default_step_s, date=today,
                plan=kept.plan, network=network, trace=trace, parts=cuts,
            )  # fmt: skip
        except (ValueError, IndexError) as error:  # on rank 0 alone, so it must not stop this rank
            log.warning("anabranch: the plan cache cannot keep %s: %s", kept.label, error)
            return
        self._files.write(self._key, choice)

    def _check(self, choice: CachedChoice, max_lanes: int) -> None:
        """Raise unless this training can run the choice."""
        options = replace(self._options, plan=choice.plan, network=choice.network)
        options.check_fits(self._parameters, self._ranks, self._collectives)
        sizes = {tensor.name: tensor.numel for tensor in choice.trace.tensors}
        if sizes != {name: parameter.numel() for name, parameter in self._parameters.items()}:
            raise PlanError("its trace has other gradients than this model trains")
        # Only rank 0 compares networks: where ranks are given different ones, rank 0's counts.
        if self._files is not None and self._options.network not in (None, choice.network):
            raise PlanError("its network is not the one that was given (network=)")
        if choice.plan is None:
            return
        if choice.plan.lanes > (most := min(max_lanes, self._options.lanes or max_lanes)):
            raise PlanError(f"its plan needs {choice.plan.lanes} lanes: expected at most {most}")
        allowed = [DENSE, *options.kinds]
        if self._collectives.residuals.warmup_steps:
            allowed += warm_up_kinds(options.kinds, self._collectives, self._parameters)
        if self._collectives.nodes is not None:
            allowed += [two_level(kind) for kind in allowed]
        for bucket in choice.plan.buckets:
            if bucket.collective not in allowed:
                raise PlanError(f"its plan sends gradients by {bucket.collective}, which this training did not ask for")
            if wrong := sorted(options.excluded.get(bucket.collective, frozenset()).intersection(bucket.names)):
                raise PlanError(f"its plan sends {wrong[0]} by {bucket.collective}, which must not be used for it")


def key_lines(options: TuningOptions, ranks: int, backend: str) -> list[str]:
    """The lines of a key that come from the options, the process group and the lab."""
    network = options.network
    return [
        f"ranks {ranks}",
        f"backend {backend}",
        f"emulated network {network_note()}",
        f"lab {lab_note()}",
        f"planner {options.planner}",
        f"lanes {options.lanes}",
        f"nodes {options.nodes}, {options.found_nodes.nodes}",
        f"kinds {', '.join(options.kinds)}",
        f"network {'measured' if network is None else sha256(dumps(network).encode()).hexdigest()}",
    ]


def hardware_lines(device: torch.device, control: Group) -> list[str]:
    """Which rank is on which host, by number, and the devices of all ranks. Collective.

    Names of hosts are not in it, so that a training finds its plan again on other hosts of the same kind.
    """
    if device.type == "cuda":
        own_device = torch.cuda.get_device_name(device)
    else:
        own_device = f"CPU {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    own = f"{socket.gethostname()}\n{own_device}".encode(errors="replace")
    hosts, devices = zip(*(text.decode().split("\n", 1) for text in from_all_ranks(own, control)), strict=True)
    number = {host: index for index, host in enumerate(dict.fromkeys(hosts))}
    return [f"hosts {_runs([str(number[host]) for host in hosts])}", f"devices {_runs(devices)}"]


def version_lines(device: torch.device) -> list[str]:
    """The versions of the programs whose change can make another plan the fastest."""
    lines = [f"anabranch {__version__}", f"torch {torch.__version__}"]
    if device.type == "cuda":
        lines += [f"CUDA {torch.version.cuda}", f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"]
    return lines


def _runs(words: Sequence[str]) -> str:
    """Equal neighbours counted: "4 × a, 2 × b"."""
    return ", ".join(f"{len(list(same))} × {word}" for word, same in groupby(words))
