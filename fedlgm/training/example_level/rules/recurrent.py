"""Long short-term memory. Every step's gates are linear in the step's input and in the state before
it, so the weights' gradients are products over the steps, as of two fully connected layers.

The gradients of the gates come from a backward pass through time, which PyTorch's own, fused layer
does not hand out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedlgm.training.example_level.rules.linear import LinearRule
from fedlgm.training.example_level.rules.rule import Kept, Rule, Use
from fedlgm.training.stack.tape import Memory

aten = torch.ops.aten
States = tuple[Tensor, Tensor]
"""Hidden states and cells."""


class LstmRule(Rule):
    """`nn.LSTM` of sequences [n, T, in], in one direction, with or without states to begin with.

    Its inputs are joined to one tensor, and so are its outputs: [n, T, hidden] followed by the last
    hidden state and the last cell of every layer.
    """

    module: nn.LSTM

    @classmethod
    @override
    def suits(cls, module: Any) -> bool:
        drops = module.num_layers > 1 and module.dropout > 0
        return module.batch_first and not (module.bidirectional or module.proj_size or drops)

    @classmethod
    @override
    def dimensions(cls, module: nn.Module) -> int:
        return 3

    def __init__(self, module: nn.LSTM, memory: Memory, name: str) -> None:
        super().__init__(module, memory, name)
        self._parts = [
            _Part(module, memory, name, f"{source}_l{layer}")
            for layer in range(module.num_layers)
            for source in ("ih", "hh")
        ]

    @override
    def join(self, x: Tensor, states: States | None = None) -> Tensor:
        if states is None:
            self.module.check_input(x, None)
            return x
        self.module.check_forward_args(x, states, None)  # type: ignore[arg-type]
        return torch.cat([x.flatten(1), *(s.transpose(0, 1).flatten(1) for s in states)], 1)

    @override
    def outputs(self, out: Tensor) -> tuple[Tensor, States]:
        layers = self.module.num_layers
        last = out[:, -2 * layers :].transpose(0, 1)
        return out[:, : -2 * layers], (last[:layers], last[layers:])

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        out, first = self._apart(x)
        layers, saved = self.module.num_layers, list[Tensor]()
        for layer in range(layers):
            before = first[:, layer], first[:, layers + layer]
            saved += self._run(out, before, *self._parts[2 * layer : 2 * layer + 2])
            out = saved[-3][:, 1:]
        last = [value[:, -1:] for value in (*saved[::3], *saved[1::3])]
        return torch.cat([out, *last], 1), tuple(saved)

    @override
    def numbers_to_keep(self, x: Tensor, out: Tensor) -> int:
        return 6 * x.shape[1] * self.module.hidden_size * self.module.num_layers

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

    def _trained_parts(self, use: Use) -> list[tuple[_Part, list[str], Use]]:
        """The parts with trained parameters, these parameters' names in the module, and the parts'
        uses.
        """
        parts = list[tuple[_Part, list[str], Use]]()
        for part, of_part in zip(self._parts, self._through_time(use), strict=True):
            part.parameters = [key for key, name in part.names.items() if name in self.parameters]
            if part.parameters:
                parts.append((part, [part.names[key] for key in part.parameters], of_part))
        return parts

    def _apart(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Sequences [n, T, in], and the states and cells of all layers to begin with, [n, 2 layers,
        hidden].
        """
        module = self.module
        count, size = 2 * module.num_layers, module.hidden_size
        if x.dim() == 3:
            return x, x.new_zeros(len(x), count, size)
        sequences, states = x.tensor_split([x.shape[1] - count * size], 1)
        return sequences.unflatten(1, (-1, module.input_size)), states.unflatten(1, (count, size))

    def _run(self, x: Tensor, before: States, ih: _Part, hh: _Part) -> tuple[Tensor, ...]:
        """One layer: hidden states and cells [n, T + 1, hidden], of which the first are given, and
        gates [n, T, 4 hidden]. In memory, time comes first.
        """
        bias = None if ih.bias is None or hh.bias is None else ih.bias + hh.bias
        gates = nn.functional.linear(x.transpose(0, 1), ih.weight, bias)
        steps, n, size = len(gates), len(x), self.module.hidden_size
        hidden, cells = x.new_empty(2, steps + 1, n, size)
        hidden[0], cells[0] = before
        squashed, weight = x.new_empty(n, size), hh.weight.t()
        for t, gate in enumerate(gates):
            gate.addmm_(hidden[t], weight)
            admit, keep, new, show = gate.chunk(4, 1)
            gate[:, : 2 * size].sigmoid_()
            new.tanh_()
            show.sigmoid_()
            torch.mul(keep, cells[t], out=cells[t + 1]).addcmul_(admit, new)
            torch.mul(show, torch.tanh(cells[t + 1], out=squashed), out=hidden[t + 1])
        return hidden.transpose(0, 1), cells.transpose(0, 1), gates.transpose(0, 1)

    def _through_time(self, use: Use) -> list[Use]:
        """The use of every part, whose output is the input of the gates; `shared` gets the gradient
        of the input.
        """
        layers = self.module.num_layers
        x, _ = self._apart(use.x)
        dy, last = use.dy[:, : -2 * layers], use.dy[:, -2 * layers :]
        uses, of_hidden, of_cells = list[Use](), list[Tensor](), list[Tensor]()
        for layer in reversed(range(layers)):
            hidden, cells, gates = use.saved[3 * layer : 3 * layer + 3]
            ih, hh = self._parts[2 * layer : 2 * layer + 2]
            ends = last[:, layer], last[:, layers + layer]
            gradients, dh, dc = _gradients_of_gates(gates, cells, dy, ends, hh.weight)
            below = use.saved[3 * layer - 3][:, 1:] if layer else x
            uses[:0] = [Use(below, gradients), Use(hidden[:, :-1].contiguous(), gradients)]
            dy = gradients @ ih.weight
            of_hidden, of_cells = [dh, *of_hidden], [dc, *of_cells]
        if use.x.dim() == 2:  # with the states to begin with
            dy = torch.cat([dy.flatten(1), *of_hidden, *of_cells], 1)
        use.shared = (dy,)
        return uses


class _Part(LinearRule):
    """One of the two products of a layer of the module, a fully connected layer of its parameters.

    Attributes:
        names: names of its parameters in the module.
    """

    def __init__(self, module: nn.LSTM, memory: Memory, name: str, suffix: str) -> None:
        self.names = {"weight": f"weight_{suffix}"} | (
            {"bias": f"bias_{suffix}"} if module.bias else {}
        )
        outputs, inputs = getattr(module, self.names["weight"]).shape
        layer = nn.Linear(inputs, outputs, bias=module.bias, device="meta")
        for key, own in self.names.items():
            setattr(layer, key, getattr(module, own))
        super().__init__(layer, memory, f"{name}.{suffix}")

    @property
    def weight(self) -> Tensor:
        """The weight, detached."""
        return self.module.weight.detach()

    @property
    def bias(self) -> Tensor | None:
        """The bias, detached."""
        return self.bias_of()


class _KeptParts(Kept):
    """Data of the parts, with the places of their parameters among those of the module."""

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


def _gradients_of_gates(
    gates: Tensor, cells: Tensor, dy: Tensor, ends: States, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the gates' inputs [n, T, 4 hidden], and of the states and cells before the first
    step.

    With a, k, m, s for the gates that admit, keep, make and show, and their inputs underlined, the
    forward pass is c' = k c + a m and h' = s tanh(c').

    Args:
        gates: the gates.
        cells: the cells c, [n, T + 1, hidden].
        dy: gradients of the hidden states h', [n, T, hidden].
        ends: further gradients of the last hidden state and of the last cell.
        weight: weight of the hidden state, [4 hidden, hidden].
    """
    gates, cells, dy = (value.transpose(0, 1) for value in (gates, cells, dy))
    admit, keep, new, show = gates.chunk(4, 2)
    squashed = cells[1:].tanh()
    slopes = torch.stack(
        [
            aten.sigmoid_backward(new, admit),
            aten.sigmoid_backward(cells[:-1], keep),
            aten.tanh_backward(admit, new),
            aten.sigmoid_backward(squashed, show),
        ],
        2,
    )
    through = aten.tanh_backward(show, squashed)
    gradients, (dh, dc) = torch.empty_like(slopes), ends
    for t in reversed(range(len(gates))):
        dh = dh + dy[t]
        dc = torch.addcmul(dc, dh, through[t])
        torch.mul(slopes[t, :, :3], dc[:, None], out=gradients[t, :, :3])
        torch.mul(slopes[t, :, 3], dh, out=gradients[t, :, 3])
        dc = dc * keep[t]
        dh = gradients[t].flatten(1) @ weight
    return gradients.flatten(2).transpose(0, 1).contiguous(), dh, dc
