"""A task's optimiser, checked by test updates: ZeRO gives it flat pieces of the weights, which not all can update."""

from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from titans_pt.errors import UserError
from titans_pt.parallel.muon import Muon
from titans_pt.tasks import Task

WEIGHTS = (0.5, -1.0, 20.0, -30.0)
GRADIENTS = (1.0, 0.2, -0.03, 4.0), (-2.0, 0.1, 0.05, 3.0), (0.5, -0.3, 0.02, -1.0)
"""Weights and gradients of the test updates; the first two weights and their gradients differ in size from the rest."""
LR = 0.01
"""Learning rate of the test updates."""


def optimizer_of(task: Task, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """Builds the task's optimiser of ``model``; its groups hold the trained parameters alone.

    Raises:
        UserError: its groups do not hold every trained parameter once; it does not treat every weight by itself; its
            state is not a number per weight, which no checkpoint would hold; or its first update is a special one.
    """
    optimizer, name = task.optimizer(model, device), f"task: the optimiser of {task.name}"
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p.requires_grad]
    optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
    held = Counter(id(p) for group in optimizer.param_groups for p in group["params"])
    counts = {n: held.pop(id(p), 0) for n, p in model.named_parameters() if p.requires_grad}
    if absent := [n for n, count in counts.items() if count == 0]:
        raise UserError(f"{name} leaves out {len(absent)} of {len(counts)} trained parameters, such as {absent[0]}; "
                        "add them to a group, or freeze them (train.trainable)")  # fmt: skip
    if twice := [n for n, count in counts.items() if count > 1]:
        raise UserError(f"{name} holds {twice[0]} {counts[twice[0]]} times; leave it in one group")
    if held:
        raise UserError(f"{name} holds {len(held)} tensors that are not parameters of the model; leave them out")
    if optimizer.state:
        raise UserError(f"{name} has state before its first update (as Adagrad does), when ZeRO has not made the "
                        "tensors that it updates; choose another optimiser")  # fmt: skip
    if not isinstance(optimizer, Muon):  # which knows where its matrices are
        for group in optimizer.param_groups:
            _check(optimizer, group, name, torch.device("cpu") if device.type == "meta" else device)
    return optimizer


def set_step(state: dict[str, Any], count: int):
    """Sets the number of updates in a tensor's optimiser state, where the optimiser keeps it there."""
    if isinstance(state.get("step"), Tensor):
        state["step"].fill_(count)
    elif "step" in state:
        state["step"] = count


def _check(optimizer: torch.optim.Optimizer, group: dict[str, Any], name: str, device: torch.device):
    """
    Raises:
        UserError: see :func:`optimizer_of`.
    """

    def updated(first: int, last: int, begun: bool = False) -> Tensor:
        """WEIGHTS[first:last] after three updates; begun: after the one by which titans_pt.training.masters creates the
        state."""
        weight = nn.Parameter(torch.tensor(WEIGHTS[first:last], device=device))
        twin: Any = object.__new__(type(optimizer))
        own = group | {"params": [weight], "lr": LR}
        twin.__dict__ |= optimizer.__dict__ | {"state": defaultdict(dict), "param_groups": [own]}
        before = _numbers(twin.__dict__ | own)
        if begun:
            own |= {"lr": 0.0, "weight_decay": 0.0}
            weight.grad = torch.zeros_like(weight)
            twin.step()
            set_step(twin.state[weight], 0)
            own |= {"lr": LR, "weight_decay": group.get("weight_decay", 0.0)}
        for gradients in GRADIENTS:
            weight.grad = torch.tensor(gradients[first:last], device=device)
            twin.step()
        other = {key for key, value in _numbers(twin.__dict__ | own).items() if before.get(key) != value}
        other |= {str(key) for key in twin.state if key is not weight}
        other |= {key for key, value in twin.state[weight].items() if value is not None and key != "step"
                  and not (isinstance(value, Tensor) and value.shape == weight.shape)}  # fmt: skip
        if other and not begun:
            raise UserError(f"{name} keeps {', '.join(sorted(other))}, which are not numbers per weight, so that no "
                            "checkpoint would hold them; choose another optimiser")  # fmt: skip
        return weight.detach()

    try:
        whole, parts = updated(0, 4), torch.cat([updated(0, 2), updated(2, 4)])
        begun = updated(0, 4, begun=True)
    except UserError:
        raise
    except Exception as error:  # of the optimiser's own
        raise UserError(f"{name} cannot update flat pieces of the weights: {type(error).__name__}: {error}; choose "
                        "another optimiser") from error  # fmt: skip
    if not torch.allclose(whole, parts, rtol=1e-5, equal_nan=True):
        raise UserError(f"{name} does not treat every weight by itself: in a test update, weights changed others' "
                        "updates, and ZeRO cuts the weights into pieces; choose another optimiser")  # fmt: skip
    if not torch.allclose(whole, begun, rtol=1e-5, equal_nan=True):
        raise UserError(f"{name} treats its first update in a special way (Rprop and SGD's dampening do), and its "
                        "state must exist before that update; choose another optimiser")  # fmt: skip


def _numbers(options: dict[str, Any]) -> dict[str, Any]:
    """The numbers among an optimiser's public attributes or a group's options; not the learning rate."""
    return {
        key: value
        for key, value in options.items()
        if type(value) in (int, float) and key != "lr" and not key.startswith("_")
    }
