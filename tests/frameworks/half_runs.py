"""Trainings in fp16 by Transformers, Accelerate and Lightning, on the ranks of a lab; run as a program.

    anabranch lab --hosts 2 --rate unshaped --backend nccl -- python tests/frameworks/half_runs.py OUT.json

Each is trained by stock DDP and by anabranch, with accumulation, clipping and a GradScaler that begins too high: steps
are skipped and the scale falls, and rises again. With Ok-Topk one is stopped, and resumed from its checkpoint. Rank 0
writes what it saw after each training. Without a GPU the same runs on CPUs, for a rehearsal: ``--backend gloo``.
"""

import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # it is run as a program

import anabranch as ab
from anabranch.frameworks.wrappers import Wrapper
from frameworks.lightning_runs import BATCHES, PLAN, batches, classifier, sparse, strategy
from frameworks.tiny import gpt2, options_of, rows

STEPS, ACCUMULATED, MAX_NORM = 30, 2, 0.5
STOPPED_AFTER = 20  # steps
INITIAL_SCALE, GROWTH_INTERVAL = 2.0**24, 6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TIMEOUT = timedelta(seconds=60)  # of a collective whose other rank has failed


@dataclass
class Seen:
    """What one training was like, on one rank."""

    losses: list[float] = field(default_factory=list)  # of every step, or of every batch
    scales: list[float] = field(default_factory=list)  # after every step
    wrapper: str = ""
    explanation: str = ""
    kept_scale: float | None = None  # of the residuals at the end: that of the last step's loss
    kept_norm: float = 0.0  # of all residuals, over this scale
    seconds: float = 0.0
    error: str = ""

    def note_end(self, wrapper: torch.nn.Module) -> None:
        self.wrapper = type(wrapper).__name__
        if isinstance(wrapper, Wrapper):
            self.explanation = wrapper.explain()
            state = wrapper.comm_state_dict()
            if state.get("residuals"):
                self.kept_scale = state["scale"]
                squares = [part.double().square().sum().item() for part in state["residuals"].values()]
                self.kept_norm = sum(squares) ** 0.5 / (self.kept_scale or 1.0)


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler(DEVICE, init_scale=INITIAL_SCALE, growth_interval=GROWTH_INTERVAL)


def gpt2_options(kind: str) -> dict[str, Any] | None:
    """Arguments of DataParallel for ``tiny.gpt2``; None for stock DDP."""
    if kind == "ddp":
        return None
    if kind != "int8":
        return options_of(kind)
    (large, small) = options_of("oktopk")["plan"].buckets
    return {"compress": "int8", "plan": ab.Plan((ab.Bucket(large.names, collective="int8"), small))}


# Accelerate, which makes a GradScaler on GPUs only.


def in_half(helper: Any) -> None:
    """Give an Accelerator of ``precision_of("fp16")`` the scaler of these runs, and on CPUs also autocast."""
    helper.scaler = scaler()
    if DEVICE == "cpu":
        helper.native_amp = True
        helper.state._mixed_precision = "fp16"


def precision_of(precision: str) -> str:
    return "no" if precision == "fp16" and DEVICE == "cpu" else precision


def forget_state() -> None:
    """Of the Accelerator before, in this process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()


def by_accelerate(
    options: dict[str, Any] | None, precision: str, steps: int, seen: Seen, saved: str = "", resumed: str = ""
) -> None:
    """A loop as in Accelerate's manual."""
    from accelerate import Accelerator

    from anabranch.frameworks.accelerate import use_anabranch

    forget_state()
    helper = Accelerator(
        cpu=DEVICE == "cpu", mixed_precision=precision_of(precision), gradient_accumulation_steps=ACCUMULATED
    )
    assert helper.num_processes == 2 and helper.device.type == DEVICE
    if precision == "fp16":
        in_half(helper)
    torch.manual_seed(10 + dist.get_rank())  # of dropout
    model = gpt2()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if options is not None:
        if "memory" in options:
            options = {**options, "memory": ab.Lean(optimizer, clip_norm=MAX_NORM)}
        use_anabranch(helper, **options)
    examples: Any = rows()
    loader: Any = torch.utils.data.DataLoader(examples, batch_size=4)
    model, optimizer, loader = helper.prepare(model, optimizer, loader)
    given = [batch for _ in range(ACCUMULATED * steps // len(loader) + 1) for batch in loader]
    if resumed:
        helper.load_state(resumed)
    first, last = STOPPED_AFTER if resumed else 0, STOPPED_AFTER if saved else steps
    for batch in given[ACCUMULATED * first : ACCUMULATED * last]:
        with helper.accumulate(model):
            loss = model(**batch).loss
            helper.backward(loss)
            if helper.sync_gradients:
                helper.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        seen.losses.append(helper.reduce(loss.detach(), "mean").item())
        if helper.sync_gradients and helper.scaler is not None:
            seen.scales.append(helper.scaler.get_scale())
    if saved:
        helper.save_state(saved)
        helper.wait_for_everyone()
    seen.note_end(model)
    helper.free_memory()


# Transformers.


def by_trainer(
    options: dict[str, Any] | None, precision: str, steps: int, seen: Seen, saved: str = "", resumed: str = ""
) -> None:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from anabranch.frameworks.transformers import use_anabranch

    class NoteScale(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if (of_trainer := made.accelerator.scaler) is not None:
                seen.scales.append(of_trainer.get_scale())
            control.should_training_stop |= bool(saved) and state.global_step == STOPPED_AFTER

    forget_state()
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            saved or folder, use_cpu=DEVICE == "cpu", fp16=precision_of(precision) == "fp16", bf16=precision == "bf16",
            per_device_train_batch_size=4, gradient_accumulation_steps=ACCUMULATED, max_grad_norm=MAX_NORM,
            learning_rate=3e-3, max_steps=steps, logging_steps=1, save_strategy="steps" if saved else "no",
            save_steps=STOPPED_AFTER, report_to=[], disable_tqdm=True, log_level="error",
            ddp_find_unused_parameters=False,
        )  # fmt: skip
        made = Trainer(gpt2(), arguments, train_dataset=rows())
        assert made.args.world_size == 2 and made.accelerator.device.type == DEVICE
        if precision == "fp16":
            in_half(made.accelerator)
        made.remove_callback(PrinterCallback)
        made.add_callback(NoteScale())
        if options is not None:
            use_anabranch(made, **options)
        made.train(resume_from_checkpoint=f"{resumed}/checkpoint-{STOPPED_AFTER}" if resumed else None)
        losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
        seen.losses += losses[STOPPED_AFTER:] if resumed else losses
        seen.note_end(made.model_wrapped)


# Lightning.


def lightning_options(kind: str) -> dict[str, Any] | None:
    if kind == "ddp":
        return None
    if kind == "int8":
        first, second = PLAN.buckets
        return {"compress": "int8", "plan": ab.Plan((first, ab.Bucket(second.names, collective="int8")))}
    return sparse() if kind == "oktopk" else {}


def by_lightning(
    options: dict[str, Any] | None, precision: str, steps: int, seen: Seen, saved: str = "", resumed: str = ""
) -> None:
    pl = import_module("lightning.pytorch" if find_spec("lightning") else "pytorch_lightning")
    plugins: Any = import_module(f"{pl.__name__}.plugins")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    used = scaler() if precision == "fp16" else None
    flag = "16-mixed" if precision == "fp16" else "bf16-mixed"

    class NoteScale(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if used is not None and len(module.losses) % ACCUMULATED == 0:
                seen.scales.append(used.get_scale())

        def on_train_end(self, trainer: Any, *_: Any) -> None:
            seen.note_end(trainer.strategy.model)

    module = classifier(pl)
    named = strategy(**options) if options else "ddp" if options is None else "anabranch"
    if options is not None:
        import_module("anabranch.frameworks.lightning")
    trainer = pl.Trainer(
        strategy=named, accelerator="gpu" if DEVICE == "cuda" else "cpu", devices=1, num_nodes=2,
        max_epochs=ACCUMULATED * (STOPPED_AFTER if saved else steps) // BATCHES, accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=MAX_NORM, plugins=[plugins.MixedPrecision(flag, DEVICE, used)], callbacks=[NoteScale()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, batches(), ckpt_path=f"{resumed}.ckpt" if resumed else None)
    if saved:
        trainer.save_checkpoint(f"{saved}.ckpt")
    seen.losses += module.losses


# All of them.

BY: dict[str, tuple[Callable[..., None], Callable[[str], Any]]] = {
    "transformers": (by_trainer, gpt2_options),
    "accelerate": (by_accelerate, gpt2_options),
    "lightning": (by_lightning, lightning_options),
}
KINDS = ("ddp", "dense", "int8", "oktopk")
LEAN = {"memory": ab.Lean()}


def trained(framework: str, kind: str, precision: str, steps: int, **halves: str) -> Seen:
    """One training; an error is noted, for the others are worth their time."""
    train, options_for = BY[framework]
    seen, start_s = Seen(), time.perf_counter()
    try:
        train(LEAN if kind == "lean" else options_for(kind), precision, steps, seen, **halves)
    except Exception as error:
        is_refusal = isinstance(error, ValueError) and kind == "lean"
        seen.error = str(error) if is_refusal else traceback.format_exc()
    seen.seconds = time.perf_counter() - start_s
    return seen


def main(path: Path) -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
        for fast in ("flash", "mem_efficient", "cudnn"):  # their backward passes add in any order
            getattr(torch.backends.cuda, f"enable_{fast}_sdp")(False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", timeout=TIMEOUT)
    os.environ["TORCHELASTIC_RUN_ID"] = "lab"  # Lightning then leaves the variables of ranks as they are
    answers: dict[str, Any] = {"device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"}
    for framework in BY:
        packages = ("lightning", "pytorch_lightning") if framework == "lightning" else (framework,)
        if not any(find_spec(package) for package in packages):
            continue
        checkpoint = str(path.with_name(framework))
        runs: list[tuple[str, str, str, dict[str, str]]] = [(kind, kind, "fp16", {}) for kind in KINDS]
        runs += [
            ("stopped", "oktopk", "fp16", {"saved": checkpoint}),
            ("resumed", "oktopk", "fp16", {"resumed": checkpoint}),
            ("lean", "lean", "fp16", {}),
            ("ddp", "ddp", "bf16", {}),
            ("lean", "lean", "bf16", {}),
        ]
        for name, kind, precision, halves in runs:
            seen = trained(framework, kind, precision, STEPS if precision == "fp16" else 10, **halves)
            answers[f"{framework} {name} {precision}"] = asdict(seen)
            if dist.get_rank() == 0:
                print(f"{framework} {name} {precision}: {seen.seconds:.1f} s", seen.error, flush=True)
                path.write_text(json.dumps(answers, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
