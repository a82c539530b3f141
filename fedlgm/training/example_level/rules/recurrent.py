"""Rules for recurrent layers: LSTM and GRU. Before their activations, the gates of every step are
linear functions of the step's input and of the previous state. The weights' gradients are therefore
products over the steps, as for two fully connected layers.

The gradients of the gates come from a backward pass through time. PyTorch's own layers are fused,
and do not return these gradients. During this pass, time is the first dimension of tensors in
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedlgm.training.example_level.rules.linear import LinearRule
from fedlgm.training.example_level.rules.rule import Kept, Rule, Use, add_product_
from fedlgm.training.stack.tape import Memory

aten = torch.ops.aten


class RecurrentRule(Rule):
    """Base class of rules for layers of sequences [n, T, in], in one direction, with or without
    initial states.

    The inputs of a call are joined to one tensor. The outputs are joined to another tensor, which
    contains the hidden states [n, T, hidden] followed by the last states of every layer.

    Attributes:
        states: number of states of a layer: 2 with cells, 1 without cells.
        kept: number of values that are kept for the backward pass for every step and unit.
    """

    module: nn.RNNBase
    states: int
    kept: int

    @classmethod
    @override
    def suits(cls, module: Any) -> bool:
        drops = module.num_layers > 1 and module.dropout > 0
        return module.batch_first and not (module.bidirectional or module.proj_size or drops)

    @classmethod
    @override
    def dimensions(cls, module: nn.Module) -> int:
        return 3

    def __init__(self, module: nn.RNNBase, memory: Memory, name: str) -> None:
        super().__init__(module, memory, name)
        self._parts = [
            _Part(module, memory, name, f"{source}_l{layer}")
            for layer in range(module.num_layers)
            for source in ("ih", "hh")
        ]
        self._ends = self.states * module.num_layers

    @override
    def join(self, x: Tensor, states: Any = None) -> Tensor:
        if states is None:
            self.module.check_input(x, None)
            return x
        self.module.check_forward_args(x, states, None)
        each = [states] if self.states == 1 else states
        return torch.cat([x.flatten(1), *(s.transpose(0, 1).flatten(1) for s in each)], 1)

    @override
    def outputs(self, out: Tensor) -> tuple[Tensor, Any]:
        last = out[:, -self._ends :].transpose(0, 1).split(self.module.num_layers)
        return out[:, : -self._ends], last[0] if self.states == 1 else last

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        out, first = self._apart(x)
        layers, saved, last = self.module.num_layers, list[Tensor](), list[list[Tensor]]()
        for layer in range(layers):
            before = first[:, layer::layers].unbind(1)
            values = self.run(out.transpose(0, 1), before, *self._parts[2 * layer : 2 * layer + 2])
            last.append([value[-1:] for value in values[: self.states]])
            saved += [value.transpose(0, 1) for value in values]
            out = saved[-len(values)][:, 1:]
        ends = [value.transpose(0, 1) for state in zip(*last, strict=True) for value in state]
        return torch.cat([out, *ends], 1), tuple(saved)

    @override
    def numbers_to_keep(self, x: Tensor, out: Tensor) -> int:
        return self.kept * x.shape[1] * self.module.hidden_size * self.module.num_layers

    @override
    def input_gradient(self, use: Use) -> Tensor:
        if not use.shared:
            self._through_time(use)
        return use.shared[0]

    @override
    def keep(self, use: Use) -> Kept:
        parts = self._trained_parts(use)
        places = [[self.parameters.index(name) for name in names] for _, names, _ in parts]
        return _KeptParts([part.keep(of_part) for part, _, of_part in parts], places)

    @override
    def instantiate(self, use: Use) -> list[Tensor]:
        gradients = dict[str, Tensor]()
        for part, names, of_part in self._trained_parts(use):
            gradients |= zip(names, part.instantiate(of_part), strict=True)
        return [gradients[name] for name in self.parameters]

    def run(self, x: Tensor, before: Sequence[Tensor], ih: _Part, hh: _Part) -> tuple[Tensor, ...]:
        """Compute one layer's states [T + 1, n, hidden] for its input [T, n, in] and the initial
        states `before`. Further results are for the backward pass.
        """
        raise NotImplementedError

    def gradients(
        self, saved: Sequence[Tensor], dy: Tensor, ends: Sequence[Tensor], weight: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Compute the gradients of the outputs of the two products, [T, n, rows of the weight], and
        of the states before the first step.

        Args:
            saved: results of `run`. All results except the states are overwritten.
            dy: gradients of the hidden states, [T, n, hidden].
            ends: additional gradients of each last state.
            weight: the weight by which the hidden state is multiplied.
        """
        raise NotImplementedError

    def _trained_parts(self, use: Use) -> list[tuple[_Part, list[str], Use]]:
        """Return the parts with trained parameters, each with the module's names of these
        parameters and with its use.
        """
        parts = list[tuple[_Part, list[str], Use]]()
        for part, of_part in zip(self._parts, self._through_time(use), strict=True):
            part.parameters = [key for key, name in part.names.items() if name in self.parameters]
            if part.parameters:
                parts.append((part, [part.names[key] for key in part.parameters], of_part))
        return parts

    def _apart(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split a joined input into sequences [n, T, in] and initial states [n, states * layers,
        hidden].
        """
        count, size = self._ends, self.module.hidden_size
        if x.dim() == 3:
            return x, x.new_zeros(len(x), count, size)
        sequences, states = x.tensor_split([x.shape[1] - count * size], 1)
        return sequences.unflatten(1, (-1, self.module.input_size)), states.unflatten(
            1, (count, size)
        )

    def _through_time(self, use: Use) -> list[Use]:
        """Run the backward pass through time, and return the uses of all parts. Store the gradient
        of the input in `use.shared`.
        """
        layers = self.module.num_layers
        each = len(use.saved) // layers
        x, _ = self._apart(use.x)
        dy, last = use.dy[:, : -self._ends], use.dy[:, -self._ends :]
        uses, firsts = list[Use](), list[list[Tensor]]()
        for layer in reversed(range(layers)):
            saved = [value.transpose(0, 1) for value in use.saved[each * layer :][:each]]
            ih, hh = self._parts[2 * layer : 2 * layer + 2]
            of_ih, of_hh, first = self.gradients(
                saved, dy.transpose(0, 1), last[:, layer::layers].unbind(1), hh.weight
            )
            dy, common = (of_ih @ ih.weight).transpose(0, 1), dict[str, Any]()
            below = use.saved[each * (layer - 1)][:, 1:] if layer else x
            uses[:0] = [
                Use(below, of_ih.transpose(0, 1), common=common),
                Use(
                    saved[0][:-1].transpose(0, 1),
                    of_hh.transpose(0, 1),
                    common=common if of_hh is of_ih else {},
                ),
            ]
            firsts.insert(0, first)
        if use.x.dim() == 2:  # including the initial states
            of_states = [value for state in zip(*firsts, strict=True) for value in state]
            dy = torch.cat([dy.flatten(1), *of_states], 1)
        use.shared = (dy,)
        return uses


class LstmRule(RecurrentRule):
    """Rule for `nn.LSTM`. With a, k, m and s for the gates `admit`, `keep`, `new` and `show`, the
    states are c' = k c + a m and h' = s tanh(c').
    """

    module: nn.LSTM
    states, kept = 2, 7

    @override
    def run(self, x: Tensor, before: Sequence[Tensor], ih: _Part, hh: _Part) -> tuple[Tensor, ...]:
        bias = None if ih.bias is None or hh.bias is None else ih.bias + hh.bias
        gates = nn.functional.linear(x, ih.weight, bias)
        (count, n, _), size = gates.shape, self.module.hidden_size
        hidden, cells = x.new_empty(2, count + 1, n, size)
        hidden[0], cells[0] = before
        squashed, weight = x.new_empty(count, n, size), hh.weight.t().contiguous()
        h, c = hidden.unbind(), cells.unbind()
        steps = zip(gates, gates[..., : 2 * size], *gates.chunk(4, 2), squashed, strict=True)
        for t, (gate, both, admit, keep, new, show, q) in enumerate(steps):
            gate.addmm_(h[t], weight)
            both.sigmoid_()
            new.tanh_()
            show.sigmoid_()
            torch.mul(keep, c[t], out=c[t + 1]).addcmul_(admit, new)
            torch.mul(show, torch.tanh(c[t + 1], out=q), out=h[t + 1])
        return hidden, cells, gates, squashed

    @override
    def gradients(
        self, saved: Sequence[Tensor], dy: Tensor, ends: Sequence[Tensor], weight: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        _, cells, gates, squashed = saved
        admit, keep, new, show = gates.chunk(4, 2)
        kept, of_new, through = self.memory.take("slopes", 3, *squashed.shape)
        kept.copy_(keep)
        aten.tanh_backward(admit, new, grad_input=of_new)
        aten.tanh_backward(show, squashed, grad_input=through)
        aten.sigmoid_backward(new, admit, grad_input=admit)
        aten.sigmoid_backward(cells[:-1], keep, grad_input=keep)
        aten.sigmoid_backward(squashed, show, grad_input=show)
        new.copy_(of_new)
        by_cell = gates.unflatten(2, (4, -1))[:, :, :3]
        dh, dc = (end.clone() for end in ends)
        steps = zip(gates, by_cell, show, through, kept, dy, strict=True)
        for gate, of_cell, of_show, slope, share, d in reversed(list(steps)):
            dh += d
            dc.addcmul_(dh, slope)
            of_cell.mul_(dc[:, None])
            of_show.mul_(dh)
            dc *= share
            torch.mm(gate, weight, out=dh)
        return gates, gates, [dh, dc]


class GruRule(RecurrentRule):
    """Rule for `nn.GRU`. With r, z and m for the gates `reset`, `retain` and `new`, with x for the
    input's product for `new`, and with p for the previous state's product for it, the gate is m =
    tanh(x + r p) and the state is h' = (1 - z) m + z h.
    """

    module: nn.GRU
    states, kept = 1, 7

    @override
    def run(self, x: Tensor, before: Sequence[Tensor], ih: _Part, hh: _Part) -> tuple[Tensor, ...]:
        gates = nn.functional.linear(x, ih.weight, ih.bias)
        products, weight = torch.empty_like(gates), hh.weight.t().contiguous()
        bias = weight.new_zeros(weight.shape[1]) if hh.bias is None else hh.bias
        (count, n, _), size = gates.shape, self.module.hidden_size
        hidden = x.new_empty(count + 1, n, size)
        hidden[0] = before[0]
        h = hidden.unbind()
        steps = zip(gates[..., : 2 * size], *gates.chunk(3, 2), products, strict=True)
        for t, (both, reset, retain, new, product) in enumerate(steps):
            torch.addmm(bias, h[t], weight, out=product)
            both.add_(product[:, : 2 * size]).sigmoid_()
            new.addcmul_(reset, product[:, 2 * size :]).tanh_()
            torch.lerp(new, h[t], retain, out=h[t + 1])
        return hidden, gates, products

    @override
    def gradients(
        self, saved: Sequence[Tensor], dy: Tensor, ends: Sequence[Tensor], weight: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        hidden, gates, products = saved
        size = dy.shape[2]
        reset, retain, new = gates.chunk(3, 2)
        made = products[..., 2 * size :]
        kept, of_new, slope = self.memory.take("slopes", 3, *dy.shape)
        kept.copy_(retain)
        torch.sub(hidden[:-1], new, out=slope)
        aten.sigmoid_backward(slope, retain, grad_input=retain)
        aten.tanh_backward(torch.sub(1, kept, out=slope), new, grad_input=of_new)
        torch.mul(made, of_new, out=slope)
        torch.mul(of_new, reset, out=made)
        aten.sigmoid_backward(slope, reset, grad_input=reset)
        new.copy_(of_new)
        products[..., : 2 * size] = gates[..., : 2 * size]
        dh = ends[0].clone()
        each = (value.unflatten(2, (3, -1)) for value in (gates, products))
        steps = zip(products, *each, kept, dy, strict=True)
        for product, of_x, of_h, share, d in reversed(list(steps)):
            dh += d
            of_x.mul_(dh[:, None])
            of_h.mul_(dh[:, None])
            dh.mul_(share).addmm_(product, weight)
        return gates, products, [dh]


class _Part(LinearRule):
    """One of the two products in a recurrent layer (of the input or of the previous state), treated
    as a fully connected layer.

    Attributes:
        names: names of the product's parameters in the module.
    """

    def __init__(self, module: nn.RNNBase, memory: Memory, name: str, suffix: str) -> None:
        self.names = {"weight": f"weight_{suffix}"} | (
            {"bias": f"bias_{suffix}"} if module.bias else {}
        )
        outputs, inputs = getattr(module, self.names["weight"]).shape
        layer = nn.Linear(inputs, outputs, bias=module.bias, device="meta")
        for key, own in self.names.items():
            setattr(layer, key, getattr(module, own))
        super().__init__(layer, memory, f"{name}.{suffix}")
        level = suffix.partition("_")[2]
        both = (getattr(module, f"weight_{source}_{level}") for source in ("ih", "hh"))
        self._inputs = sum(weight.shape[1] for weight in both)

    @property
    def weight(self) -> Tensor:
        """The weight, detached from autograd."""
        return self.module.weight.detach()

    @property
    def bias(self) -> Tensor | None:
        """The bias, detached from autograd."""
        return self.bias_of()

    @override
    def ghost_pays(self, positions: int) -> bool:
        """Whether Gram matrices take less time than per-example gradients. The answer is the same
        for both parts of a layer, because the second part reuses the outputs' Gram matrices that
        the first part has computed.
        """
        outputs = self.extent()[0]
        return 2 * positions * (outputs + self._inputs) <= outputs * self._inputs

    @override
    def grams_of_outputs(self, use: Use, rows: slice) -> Tensor:
        if "grams" not in use.common:
            use.common["grams"] = torch.bmm(use.dy, use.dy.transpose(1, 2))
        return use.common["grams"][rows]

    @override
    def biases(self, use: Use) -> tuple[list[Tensor], list[Tensor]]:
        if "bias" not in self.parameters:
            return [], []
        if "biases" not in use.common:
            use.common["biases"] = super().biases(use)
        return use.common["biases"]

    @override
    def add_product(self, total: Tensor, use: Use, factors: Tensor) -> None:
        """Add the scaled products. The inputs are scaled, because the outputs' gradients are
        usually wider. All of these numbers are below 2^64, because their Gram matrices are finite.
        A scaled number that underflows therefore changes a product only slightly.
        """
        x, dy = (value.transpose(0, 1) for value in (use.x, use.dy))
        scaled = torch.mul(x, factors[:, None], out=self.memory.take("scaled", *x.shape))
        add_product_(total.view(self.extent()), dy.flatten(0, 1), scaled.flatten(0, 1))


class _KeptParts(Kept):
    """Kept data of a layer's parts, with the indices of the parts' parameters among the module's
    parameters.
    """

    def __init__(self, kept: Sequence[Kept], places: Sequence[Sequence[int]]) -> None:
        self._kept, self._places = kept, places
        squares = {
            place: square
            for each, of_part in zip(kept, places, strict=True)
            for place, square in zip(of_part, each.squares, strict=True)
        }
        self.squares = [squares[place] for place in sorted(squares)]

    @override
    def add(self, sums: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        for each, places in zip(self._kept, self._places, strict=True):
            each.add([sums[place] for place in places], [factors[place] for place in places])
