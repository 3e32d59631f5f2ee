"""Momentum before sending: each rank averages its own gradients over time, and sends that average (its velocity).

Without it, a value that stays in the residual for a hundred steps and is then sent at once is new to the optimizer's
momentum, which spreads it over the steps after; meanwhile every other step brings zeros. Averaged before it is sent, it
arrives as it should be applied, and the optimizer needs no momentum of its own. Where a value was sent, its velocity
is reset, so that late values do not keep pushing. Y. Lin et al., *Deep gradient compression*, ICLR 2018, call this
momentum correction and factor masking. ``BucketState`` keeps the velocity of a bucket.

Gradients that travel sparse must then not get the optimizer's momentum a second time. All others have it alone: vectors
always, and all gradients while training warms up or DDP's own buckets run. In an optimizer without momentum they would
have none, which costs learning (docs/compression.md has the numbers). So before each step of the optimizer, the buffer
of every velocity v that arrived is set such that the step applies v without momentum, and after it to 0, since nothing
is left to apply:

    Adam, AdamW   the step makes m of β m + (1 − β) v, and applies m / (1 − βᵗ): set m to (1 − βᵗ⁻¹) v
    SGD           the step makes b of μ b + (1 − d) v. In the long run it applies a gradient (1 − d) / (1 − μ) times:
                  set b to that times v, and it applies v as often, at once
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from anabranch.exchange.dense import SUMMABLE_BELOW

SUPPORTED = (Adam, AdamW, SGD)
INSTEAD = "Use OkTopk(momentum=0.0), or give the optimizer no momentum, and do without this call"


class Velocity(NamedTuple):
    """What a rank sends in place of gradients: decay · values + (1 − decay) · gradients; float32, on their device."""

    values: torch.Tensor
    decay: float

    def take(self, gradient: torch.Tensor) -> None:
        """Before an exchange: take the gradient into the velocity, which takes the gradient's place."""
        self.values.mul_(self.decay).add_(gradient, alpha=1 - self.decay)
        gradient.copy_(self.values)

    def reset_sent(self, average: torch.Tensor, residual: torch.Tensor, rounded: bool) -> None:
        """After it: reset what was sent. Gradients that cannot be sent leave no trace.

        ``rounded``: values were rounded before they were sent, so the residual is not exactly 0 where one was sent.
        """
        sent = residual == 0
        if rounded:
            sent |= average != 0  # where any rank's value was sent; and everywhere, where gradients are NaN
        self.values.masked_fill_(sent | ~(self.values.abs() < SUMMABLE_BELOW), 0.0)


def share_momentum(optimizer: Optimizer, velocities: Callable[[], Collection[nn.Parameter]]) -> None:
    """Let ``optimizer`` take no momentum of the gradients of ``velocities()``, which its next step applies."""
    check_shareable(optimizer)
    arrived: list[nn.Parameter] = []

    # Hooks use the optimizer that they are given: one that they held themselves would not be freed by its last user.
    def set_buffers(optimizer: Optimizer) -> None:
        of_velocities = set(velocities())
        for group in optimizer.param_groups if of_velocities else ():
            with_gradient = [p for p in group["params"] if p.grad is not None]
            now = [p for p in with_gradient if p in of_velocities]
            arrived.extend(now)
            if now:
                _set_buffers(optimizer, group, now, with_gradient)

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Set buffers before the step; or after its closure where that computes the gradients, as Lightning's does."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            set_buffers(optimizer)
            return None

        def closure_first() -> Any:
            loss = closure()
            set_buffers(optimizer)
            return loss

        return args[:1], {"closure": closure_first}

    @torch.no_grad()
    def after_step(optimizer: Optimizer, *_: Any) -> None:
        buffers = [optimizer.state[p].get(_buffer_name(optimizer)) for p in arrived]
        if buffers := [buffer for buffer in buffers if buffer is not None]:
            torch._foreach_zero_(buffers)
        arrived.clear()

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)


def check_shareable(optimizer: Optimizer) -> None:
    """ValueError if the momentum buffers of this optimizer cannot be set."""
    if (reason := not_shareable(optimizer)) is not None:
        raise ValueError(f"share_momentum() was given {reason}. {INSTEAD}")


def not_shareable(optimizer: object) -> str | None:
    """Why the momentum buffers of this optimizer cannot be set; None if they can."""
    if type(optimizer) not in SUPPORTED:
        kinds = ", ".join(kind.__name__ for kind in SUPPORTED)
        return (
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}: expected an optimizer of torch, one of "
            f"{kinds}; of a framework's wrapper, the optimizer inside it"
        )
    assert isinstance(optimizer, SUPPORTED)
    for group in optimizer.param_groups:
        if group.get("momentum", 0) >= 1 or group["differentiable"]:
            found = "differentiable=True" if group["differentiable"] else f"momentum={group['momentum']}"
            return f"an optimizer with {found}: expected none such"
    return None


def _buffer_name(optimizer: Optimizer) -> str:
    return "momentum_buffer" if isinstance(optimizer, SGD) else "exp_avg"


@torch.no_grad()
def _set_buffers(
    optimizer: Optimizer, group: dict[str, Any], arrived: list[nn.Parameter], with_gradient: list[nn.Parameter]
) -> None:
    """Set the buffers of ``arrived`` such that this step applies their gradients, which are velocities.

    ``with_gradient`` are all parameters of the group that have gradients.
    """
    if isinstance(optimizer, SGD):
        momentum, dampening = group["momentum"], group["dampening"]
        if not momentum:
            return
        # A fused SGD has a buffer for all parameters or for none. The first step makes it the gradient itself.
        for parameter in with_gradient:
            if optimizer.state[parameter].get("momentum_buffer") is None:
                (first,) = _applied(optimizer, group, [parameter])
                optimizer.state[parameter]["momentum_buffer"] = first * (dampening / momentum)
        buffers = [optimizer.state[parameter]["momentum_buffer"] for parameter in arrived]
        torch._foreach_copy_(buffers, _applied(optimizer, group, arrived))
        torch._foreach_mul_(buffers, (1 - dampening) / (1 - momentum))
        return
    # In the first step of a parameter m is 0, as it should be.
    arrived = [parameter for parameter in arrived if optimizer.state[parameter]]
    if arrived:
        buffers = [optimizer.state[parameter]["exp_avg"] for parameter in arrived]
        shares = 1 - group["betas"][0] ** torch.stack([optimizer.state[parameter]["step"] for parameter in arrived])
        torch._foreach_copy_(buffers, _applied(optimizer, group, arrived))
        # Steps are counted on a GPU by fused optimizers only: then nothing waits for it.
        torch._foreach_mul_(buffers, shares.tolist() if shares.device.type == "cpu" else list(shares.unbind()))


def _applied(optimizer: Optimizer, group: dict[str, Any], parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """What the optimizer adds to its buffers: gradients, and weight decay where it is not decoupled."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if (scale := getattr(optimizer, "grad_scale", None)) is not None:  # a fused optimizer unscales by itself
        gradients = list(torch._foreach_div(gradients, scale))
    if group["maximize"]:
        gradients = list(torch._foreach_neg(gradients))
    if group["weight_decay"] and not group.get("decoupled_weight_decay"):
        decayed = [p.detach() for p in parameters]
        gradients = list(torch._foreach_add(gradients, decayed, alpha=group["weight_decay"]))
    return gradients
