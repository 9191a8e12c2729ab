"""apex's Adam, as far as Megatron needs it on a CPU.

Megatron's distributed optimizer saves and loads the state of apex's (and TransformerEngine's) FusedAdam: the step is
kept in the parameter group, and a parameter's state is its two moments alone. With torch's AdamW, which keeps a step
for each parameter, it writes `--ckpt-format torch` checkpoints that it cannot load again. Only `megatron_on_cpu` uses
this module, and only where apex is not installed.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["FusedAdam", "optimizers"]


class FusedAdam(torch.optim.Optimizer):
    """Adam with fp32 moments and the state layout of apex.optimizers.FusedAdam, in plain torch operations."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        **options: Any,
    ) -> None:
        # Megatron passes `capturable=False` and the like; what is switched on cannot be left out in silence.
        wanted = sorted(name for name, value in {"amsgrad": amsgrad, **options}.items() if value)
        if wanted:
            raise ValueError(f"on a CPU FusedAdam cannot do {', '.join(wanted)}: remove the flag that asks for it")
        self.adam_w_mode = adam_w_mode
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["params"]:
                continue  # its step stands still, as in apex: Megatron allows for that when it loads
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        if decay and self.adam_w_mode:
            parameter.mul_(1 - lr * decay)
        elif decay:
            gradient = gradient.add(parameter.float(), alpha=decay)
        mean = state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correction1 = 1 - beta1 ** group["step"] if group["bias_correction"] else 1.0
        correction2 = 1 - beta2 ** group["step"] if group["bias_correction"] else 1.0
        denominator = (square / correction2).sqrt_().add_(group["eps"])
        parameter.addcdiv_(mean, denominator, value=-lr / correction1)


optimizers = types.ModuleType("apex.optimizers")
vars(optimizers).update(FusedAdam=FusedAdam, FusedSGD=torch.optim.SGD)
