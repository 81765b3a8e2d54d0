"""The weights and the optimiser's state as ZeRO keeps them: fp32, flat, cut over ranks. Here they have names.

Several short methods use DeepSpeed's private names: _flats, _create_state and _set_step, which restore the state of
torch's optimiser, and _own, _fragment and _put, which read and write a rank's part of it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from titans_pt.errors import UserError
from titans_pt.parallel import TensorParallel, Topology
from titans_pt.parallel.muon import Fragment, Muon
from titans_pt.runs.checkpoints import WEIGHT, Tensors
from titans_pt.runs.shards import Whole
from titans_pt.tasks import Task
from titans_pt.training.optimizers import set_step


class Masters:
    """The fp32 weights and the optimiser's state of a model under ZeRO, by plain parameter name.

    Args:
        engine: DeepSpeed's engine, around the task's objective.
        weights: name -> this tensor rank's exact weights, fp32, on the CPU.
        split, topology: the cut over tensor ranks, and the grid of ranks.
        task: for messages.

    Attributes:
        updates: updates applied since the start of the run, without skipped steps.
    """

    def __init__(
        self, engine: Any, weights: dict[str, Tensor], split: TensorParallel, topology: Topology, task: Task
    ):  # fmt: skip
        self._zero, self._model, self._device = engine.optimizer, engine.module.model, engine.device
        self._split, self._topology, self._task = split, topology, task.name
        self._stage = task.config.parallel.zero_stage
        parameters: list[tuple[str, Any]] = list(self._model.named_parameters())
        self._trainable = [(name, p) for name, p in parameters if p.requires_grad]
        # The module's own parameters are exact unless they are bf16, or only a shard of them is here.
        exact = self._stage < 3 and task.config.train.precision == "fp32"
        first = topology.replicas.rank == 0  # these ranks write checkpoints
        self._frozen = {
            name: p.detach() if exact else weights[name] for name, p in parameters if first and not p.requires_grad
        }
        for name, p in self._trainable:
            start, count = self._own(p)
            self._put(p, weights[name].flatten()[start : start + count], None)
        if isinstance(self._zero.optimizer, Muon):
            self._zero.optimizer.place(self._fragments(), topology.replicas, split)
        self.updates = 0
        self._moments = self._create_state()

    def gather(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yields (kind, name, tensor) for every parameter: with kind "weight", and with each kind of the optimiser's
        state ("exp_avg" and "exp_avg_sq" for AdamW).

        Collective: all ranks go through it to the end. Each gets the whole fp32 tensor and should release it at once.
        Frozen parameters have no moments, and only the first replica's ranks get these parameters.
        """
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        for name, p in self._trainable:
            yield WEIGHT, name, self._split.whole(name, safe_get_full_fp32_param(p))
            for key in self._moments[name]:
                yield key, name, self._split.whole(name, safe_get_full_optimizer_state(p, key))
        for name, weight in self._frozen.items():
            yield WEIGHT, name, self._split.whole(name, weight.to(self._device))

    def cuts(self) -> dict[str, Whole]:
        """The shape of every whole parameter, and how tensor ranks cut it."""
        found, tensor = {}, self._topology.tensor
        p: Any  # DeepSpeed adds attributes to parameters
        for name, p in self._model.named_parameters():
            dim = self._split.dims.get(name)
            shape = self._split.shapes.get(name, p.ds_shape if self._stage == 3 else p.shape)
            found[name] = Whole(tuple(shape), dim, 1 if dim is None else tensor.size)
        return found

    def pieces(self) -> tuple[dict[str, Tensor], dict[str, tuple[int, int]]]:
        """CPU copies of the weights and moments that this rank holds, as arguments for runs.shards.write_shard.

        Not collective. All ranks together hold every number exactly once.
        """
        pieces, places = {}, {}
        for name, p in self._trainable:
            start, count = self._own(p)
            whole = name not in self._split.dims  # then every tensor rank has it
            if count == 0 or (whole and self._topology.tensor.rank):
                continue
            places[name] = (0 if whole else self._topology.tensor.rank, start)
            for kind in (WEIGHT, *self._moments[name]):
                fragment = self._fragment(p, None if kind == WEIGHT else kind)
                pieces[f"{kind}.{name}"] = fragment[:count].detach().to("cpu", torch.float32, copy=True).contiguous()
        for name, weight in self._frozen.items():
            if name in self._split.dims or self._topology.tensor.rank == 0:
                places[name] = (self._topology.tensor.rank, 0)
                pieces[f"{WEIGHT}.{name}"] = weight.to("cpu", copy=True).flatten().contiguous()
        return pieces, places

    def load_moments(self, tensors: Tensors, updates: int):
        """Restores the optimiser's state bit for bit. Each rank reads only its own part; the weights came with the
        model.

        Args:
            tensors: the checkpoint's tensors.
            updates: number of updates applied when the checkpoint was written.

        Raises:
            UserError: another optimiser, with other state, wrote the checkpoint.
        """
        cuts, held = self.cuts(), tensors.moments()
        for name, p in self._trainable:
            if set(held[name]) != set(self._moments[name]):
                was, now = (", ".join(sorted(kinds)) or "nothing" for kinds in (held[name], self._moments[name]))
                raise UserError(
                    f"task: the optimiser of {self._task} keeps {now} of {name}, and the checkpoint has {was}; put the "
                    "optimiser back, or start another run.dir from its weights (train.init_from)"
                )
            start, count = self._own(p)
            part = self._topology.tensor.rank if name in self._split.dims else 0
            for key in self._moments[name]:
                self._put(p, tensors.span(key, name, cuts[name], part, start, start + count), key)
        self._set_step(updates)

    def _own(self, p: Any) -> tuple[int, int]:
        """(start, count) of this rank's fragment of a parameter: its share of the tensor rank's flat part."""
        if self._stage == 3:
            size = p.ds_tensor.ds_numel
            start = min(size * self._topology.replicas.rank, p.ds_numel)
            return start, min(size, p.ds_numel - start)
        mapping = p._hp_mapping
        return (0, 0) if mapping is None else (mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel)

    def _fragment(self, p: Any, key: str | None) -> Tensor:
        """This rank's flat fragment of the fp32 weights, or of the state ``key``; ZeRO 3 appends padding."""
        from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

        if self._stage == 3:
            return safe_get_local_fp32_param(p) if key is None else safe_get_local_optimizer_state(p, key)
        return p._hp_mapping.get_hp_fragment(key)

    def _put(self, p: Any, fragment: Tensor, key: str | None):
        """Sets this rank's fragment of the fp32 weights, or of the state ``key``; flat, without padding."""
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        if self._stage == 3:
            padded = torch.zeros(p.ds_tensor.ds_numel, dtype=torch.float32)
            padded[: fragment.numel()] = fragment
            if key is None:
                safe_set_local_fp32_param(p, padded)
            else:
                safe_set_local_optimizer_state(p, padded, key)
        elif p._hp_mapping is not None:
            p._hp_mapping.get_hp_fragment(key).data.copy_(fragment)

    def _set_step(self, count: int):
        self.updates = count
        for flat, _ in self._flats():
            set_step(self._state_of(flat), count)

    def _state_of(self, flat: Tensor) -> dict[str, Any]:
        return self._zero.optimizer.state[flat]

    def _flats(self) -> list[tuple[Tensor, list[nn.Parameter]]]:
        """(flat fp32 tensor that the optimiser updates on this rank, the parameters that it is a part of)."""
        zero = self._zero
        if self._stage == 3:
            return list(zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True))
        return list(zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True))

    def _fragments(self) -> dict[Tensor, list[Fragment]]:
        """The fragments in each of this rank's flat tensors, under ZeRO 1 or 2."""
        names: dict[int, str] = {id(p): name for name, p in self._trainable}
        own = {name: (start, start + count) for name, p in self._trainable for start, count in [self._own(p)] if count}
        spans = self._topology.replicas.gather_objects(own)
        found: dict[Tensor, list[Fragment]] = {}
        p: Any  # DeepSpeed adds attributes to parameters
        for flat, parameters in self._flats():
            found[flat] = []
            for p in parameters:
                if (name := names[id(p)]) in own:
                    at = p._hp_mapping.hp_fragment_address.start
                    holders = {replica: held[name] for replica, held in enumerate(spans) if name in held}
                    found[flat].append(Fragment(name, p.shape, at, holders))
        return found

    def _create_state(self) -> dict[str, tuple[str, ...]]:
        """Makes the optimiser create its lazy state, and DeepSpeed link it to parameters; returns its kinds by name.

        An update with zero gradients, without weight decay and at lr 0 creates the state, so that the optimiser decides
        its layout. All of the state must exist before DeepSpeed links it: DeepSpeed itself links after the first
        parameter group's first update, and never finds the other groups' state.
        """
        zero, groups = self._zero, self._zero.optimizer.param_groups
        decays = [group.get("weight_decay", 0.0) for group in groups]
        for group in groups:
            group["lr"] = group["weight_decay"] = 0.0
        for flat, _ in self._flats():
            flat.grad = torch.zeros_like(flat)
        if self._stage == 3:
            for index in range(len(self._flats())):
                zero._optimizer_step(index)
        else:
            zero.optimizer.step()
            zero._lazy_init_hp_params_optimizer_state()
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = decay
        names = {id(p): name for name, p in self._trainable}
        moments: dict[str, tuple[str, ...]] = {}
        for flat, parameters in self._flats():
            flat.grad = None
            kinds = [key for key, value in self._state_of(flat).items() if value is not None and key != "step"]
            moments |= {names[id(p)]: tuple(sorted(kinds)) for p in parameters}
        self._set_step(0)
        return moments
