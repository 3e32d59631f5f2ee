"""Well-known models by name with a synthetic batch, where torchvision or transformers is installed."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from anabranch.values.checks import Scalar
from anabranch.values.dependencies import require
from anabranch.values.errors import MissingExtraError

# Default batch per rank: images, or sequences and their length; the sizes of the literature and of our lab.
IMAGES = {
    **dict.fromkeys(("googlenet", "resnet50", "resnet152", "vgg16"), 64),
    **dict.fromkeys(("densenet161", "densenet201", "inception_v3", "vit_l_16"), 32),
}
SEQUENCES = {
    "bert-base": (8, 128),
    "bert-large": (8, 128),
    "gpt2": (8, 512),
    "gpt2-medium": (4, 512),
    "llama-134m": (4, 512),
    "qwen2.5-0.5b": (2, 512),
}
# Classes of transformers by the first part of a name: what those of the model and of its configuration begin with, and
# what that of the model ends with.
FAMILIES = {
    "gpt2": ("GPT2", "LMHeadModel"),
    "llama": ("Llama", "ForCausalLM"),
    "qwen2": ("Qwen2", "ForCausalLM"),
    "bert": ("Bert", "ForMaskedLM"),
}
BLOCKS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES: dict[str, dict[str, Any]] = {  # that differ from the defaults of the model's configuration
    "bert-large": dict(zip(BLOCKS, (1024, 4096, 24, 16), strict=True)),
    "gpt2-medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "llama-134m": dict(zip((*BLOCKS, "num_key_value_heads"), (768, 2048, 12, 12, 12), strict=True)),
    "qwen2.5-0.5b": {
        **dict(zip((*BLOCKS, "num_key_value_heads"), (896, 4864, 24, 14, 2), strict=True)),
        "tie_word_embeddings": True,
    },
}
MODELS = (*IMAGES, *SEQUENCES)

Loss = Callable[[nn.Module], torch.Tensor]
Step = Callable[[nn.Module], None]  # runs one forward and backward through the model, or through a wrapper around it


def model_and_step(
    name: str, device: torch.device, autocast: torch.dtype | None = None, batch: int | None = None
) -> tuple[nn.Module, Step]:
    """A freshly initialised model in training mode, and its step; give that the model, or a wrapper around it."""
    model, loss = model_and_loss(name, device, batch)

    def step(called: nn.Module) -> None:
        called.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            value = loss(called)
        value.backward()

    return model, step


def model_and_loss(name: str, device: torch.device, batch: int | None = None) -> tuple[nn.Module, Loss]:
    """A freshly initialised model in training mode, and its loss; on any device, also on one without data."""
    check_model(name)
    if name in IMAGES:
        return _image_model(name, device, batch or IMAGES[name])
    default_batch, length = SEQUENCES[name]
    return _language_model(name, device, batch or default_batch, length)


def check_model(name: str) -> None:
    """ValueError if there is no such model."""
    if name not in MODELS:
        raise ValueError(f"model is {name!r}: expected one of {', '.join(MODELS)}")


def build_at(name: str, batch: int) -> Callable[[torch.device], tuple[nn.Module, Loss]]:
    """A function that builds a model, and its loss at this batch, on a device."""
    return lambda device: model_and_loss(name, device, batch)


def trace_meta(name: str, half: bool = False, batch: int | None = None) -> dict[str, Scalar]:
    """The meta of a trace of this model; ``half``: it was recorded with bfloat16 autocast."""
    default_batch, length = SEQUENCES[name] if name in SEQUENCES else (IMAGES[name], None)
    precision = "bf16 autocast, fp32 parameters and gradients" if half else "fp32"
    meta: dict[str, Scalar] = {"model": name, "batch": batch or default_batch, "precision": precision}
    return meta | {"optimizer": "none"} | ({} if length is None else {"sequence_length": length})


def _image_model(name: str, device: torch.device, batch: int) -> tuple[nn.Module, Loss]:
    make = _imported("torchvision.models", name, name)
    side = 299 if name == "inception_v3" else 224
    options = {"aux_logits": True, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
    with device:  # initialises large models on the GPU, which is fast
        model: nn.Module = make(weights=None, **options)
    model = model.to(device).train()
    images = torch.randn(batch, 3, side, side, device=device)
    labels = torch.randint(1000, (batch,), device=device)

    def loss(wrapped: nn.Module) -> torch.Tensor:
        outputs = wrapped(images)
        heads = [outputs] if isinstance(outputs, torch.Tensor) else [head for head in outputs if head is not None]
        return torch.stack([cross_entropy(head.float(), labels) for head in heads]).sum()

    return model, loss


def _language_model(name: str, device: torch.device, batch: int, length: int) -> tuple[nn.Module, Loss]:
    first, last = next(parts for family, parts in FAMILIES.items() if name.startswith(family))
    make, settings = (_imported("transformers", f"{first}{end}", name) for end in (last, "Config"))
    options = {} if first == "Bert" else {"use_cache": False}
    with device:  # initialises large models on the GPU, which is fast
        model = make(settings(**SIZES.get(name, {}), **options))
    model = model.to(device).train()
    tokens = torch.randint(30_000, (batch, length), device=device)

    def loss(wrapped: nn.Module) -> torch.Tensor:
        result: torch.Tensor = wrapped(input_ids=tokens, labels=tokens).loss
        return result

    return model, loss


def _imported(library: str, attribute: str, model: str) -> Any:
    """This attribute of a library, which ``model`` needs; transformers imports the file behind it only now."""
    package = library.partition(".")[0]
    torch_version = torch.__version__.partition("+")[0]
    require(package, "models", f"the model {model}", pin=f"torch=={torch_version}")
    try:
        return getattr(import_module(library), attribute)
    except (ImportError, RuntimeError, OSError, AttributeError) as error:  # as a build for another torch raises them
        first_line = str(error).strip().partition("\n")[0]
        raise MissingExtraError(
            f"the model {model} needs {package}, which is installed and cannot be imported ({first_line}): install one "
            f"that matches torch {torch_version}: pip install --force-reinstall {package} 'torch=={torch_version}'"
        ) from error
