"""One release of a node: train on its data, bound the update, add the node's noise."""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

import fedlgm
from clients.node import data as node_data
from clients.node.policy import Policy, Refusal
from clients.node.work import Work, options_of
from clients.source import ClientData
from fedlgm import inputs, models, privacy, tasks
from fedlgm.aggregation import BoundedSum
from fedlgm.contributions import Updates
from fedlgm.devices import torch_threads
from fedlgm.example_level.trainer import ExampleTrainer, digest_of, local_steps
from fedlgm.keys import KeyRing, Purpose
from fedlgm.layers import LayerTable
from fedlgm.mechanisms.base import BoundsExamples
from fedlgm.node_protocol import canonical, digest, sha256
from fedlgm.plan import ReleasePlan
from fedlgm.privacy.guarantee import Unit
from fedlgm.release import local_release
from fedlgm.training import ClientTask, LocalTraining, SequentialTrainer

_log = logging.getLogger("fedlgm.node")
REPLACED = privacy.guarantee.SENSITIVITY_FACTOR["replace-one"]


@dataclass(frozen=True)
class Request:
    """A question that has been understood and admitted; nothing has been charged or computed for it.

    Attributes:
        round: of the run that asks.
        plan: what to release.
        text: the plan as it was received.
        model: the global model, float32 [D].
        work: names and settings.
    """

    round: int
    plan: ReleasePlan
    text: str
    model: np.ndarray
    work: Work

    @property
    def unit(self) -> Unit:
        """What the release protects: all of the node's data, or one example."""
        return "example" if self.plan.bounded_by == "trainer" else "client"

    @property
    def event(self) -> Any:
        """Cost of the release, from the bounds and the noise that this node carries out.

        For the whole data: under replace-one, without amplification, since whoever reads the reply knows that this node
        took part. Correlated noise spreads a participation over the rounds after it: it costs as its column of C is
        long. For one example: of its steps under add-or-remove-one; which examples a step samples stays here.
        """
        steps = self.plan.facts.steps
        if self.unit == "example" and steps is not None:
            one = privacy.events.gaussian_event(self.plan.effective_multiplier, steps.rate)
            return privacy.events.repeated(one, steps.count)
        noise = self.plan.facts.noise
        moved = REPLACED if noise is None else REPLACED * noise.amplified_column_norm()
        multiplier = self.plan.effective_multiplier / moved
        if self.plan.family == "laplace":
            return privacy.events.laplace_event(1.0 / multiplier, 1.0, "replace-one")
        return privacy.events.gaussian_event(multiplier, 1.0)

    def least_epsilon(self, delta: float) -> float:
        """An epsilon that the release costs at least, in closed form; 0 where the composition is quick for any noise.

        Laplace noise with a total shift of a scales has delta(epsilon) = 1 - exp((epsilon - a) / 2).
        """
        if self.unit == "example" or self.plan.family != "laplace":
            return 0.0
        multiplier = self.plan.effective_multiplier
        return max(0.0, REPLACED / multiplier + 2 * math.log1p(-delta)) if multiplier > 0 else math.inf


class Releaser:
    """The node's data and its trainer, both resident.

    Args:
        policy: the node's policy.
        data: its examples.
        data_digest: of the examples.
        secret: the node's noise key, 32 bytes of the operating system.
        test_seed: for tests only: noise of a simulation with this seed, which protects nothing.
    """

    def __init__(
        self, policy: Policy, data: ClientData, data_digest: str, secret: bytes, test_seed: int | None = None
    ) -> None:
        self._policy, self._data, self._digest, self._secret = policy, data, data_digest, secret
        for name in policy.allow.tasks:
            node_data.targets(policy.data, data.y, tasks.get(name))  # refused now, not in the middle of a run
        self._test_seed = test_seed
        self._layers: dict[str, LayerTable] = {}
        self._trainer: tuple[str, SequentialTrainer | ExampleTrainer] | None = None
        self._tried: tuple[str, str] | None = None  # by `prepare`

    @property
    def data_digest(self) -> str:
        """Digest of the examples."""
        return self._digest

    def warm(self) -> None:
        """Take one step on the first example with a small model."""
        work = Work(mechanism={"name": "gaussian"}, model={"name": "logistic"})
        module = self._module(work)
        layers = LayerTable.from_module(module)
        order = KeyRing.from_seed(0).torch_generator(Purpose.TRAIN, 0, 0)
        if len(self._data):
            model, label = layers.flatten(module), torch.zeros(1, dtype=torch.int64)
            task = ClientTask(inputs.take(self._data.x, slice(0, 1)), label, order, 1)
            next(iter(SequentialTrainer(module, layers, LocalTraining()).updates(model, [task])))

    def understand(self, round: int, plan: str, work: Any, model: np.ndarray) -> Request:
        """The request of a question, admitted by the policy.

        Raises:
            Refusal: it cannot be understood or is not allowed; the reason does not depend on the data.
        """
        asked = Work.parse(work, self._policy)
        if not np.isfinite(model).all():
            raise Refusal("model", "the model holds NaN or Inf")
        layers = self._table(asked)
        try:
            asked.target()
        except Exception as error:  # its options are the server's
            raise Refusal("work", f"task: {error}"[:300]) from error
        if len(model) != layers.size:
            raise Refusal("model", f"{len(model)} numbers for a model of {layers.size} parameters")
        try:
            parsed = ReleasePlan.from_json(layers, plan)
        except Exception as error:  # a crafted plan may fail anywhere in being parsed
            raise Refusal("plan", f"the plan cannot be read: {error!r}"[:300]) from error
        self._policy.admit(parsed)
        request = Request(round, parsed, plan, model, asked)
        if request.unit == "example":
            self._check_steps(asked, parsed)
        elif asked.exact_sums:
            raise Refusal("work", "exact_sums belongs to example-level steps; this plan bounds whole updates")
        return request

    def name(self, request: Request, run: str) -> str:
        """Name of the release: a keyed digest of all that its numbers depend on.

        The data are among them: were they not, one more record would be released with the same noise as before, and the
        difference of the two answers would show it bare. The run's label is not under local trust: the same question
        costs once. Under central trust every run adds noise of its own to what it is answered, and invites this node
        by a schedule of its own: an answer to another run is another participation.
        """
        versions = (fedlgm.__version__, torch.__version__, self._policy.limits.threads)
        parts: tuple[str | int, ...] = (
            self._digest,
            request.round,
            self._policy.node.client,
            request.text,
            sha256(request.model.data),
        )
        work = request.work.model_dump() | {"exact_sums": self._exact(request.work)}
        if request.plan.facts.trust == "central":
            parts += (run,)
        named = digest("release", *parts, canonical(work), *versions)
        return hmac.new(self._secret, named.encode(), hashlib.sha256).hexdigest()

    def prepare(self, request: Request) -> None:
        """Build what a release needs and try it on a made-up example, before anything is charged.

        Raises:
            Refusal: it fails whatever this node's data are, for example a model that takes other inputs.
        """
        tried = request.unit, canonical(request.work.model_dump())
        if tried == self._tried:
            return
        plan, settings = request.plan, request.work.local()
        model, own = torch.from_numpy(request.model.copy()), self._data.y
        order = KeyRing.from_seed(0).torch_generator(Purpose.TRAIN, 0, 0)
        try:
            with torch_threads(self._policy.limits.threads):
                x = torch.zeros(1, *self._policy.data.shape)
                y = node_data.targets(
                    self._policy.data, torch.zeros(1, *own.shape[1:], dtype=own.dtype), request.work.target()
                )
                if request.unit == "example":
                    trainer = self._example_trainer(request.work)
                    trainer.weights.copy_(model)
                    trainer.sum(x, y, torch.zeros(1, dtype=torch.int64), plan)
                else:
                    next(iter(self._resident(request.work, settings).updates(model, [ClientTask(x, y, order, 1)])))
        except Exception as error:  # of the server's names and options, or of the operator's own model
            raise Refusal("work", f"training fails on any data: {error}"[:300]) from error
        self._tried = tried

    def make(self, request: Request, name: str) -> np.ndarray:
        """The numbers of a release that has been charged: bounded and, under local trust, noised; float64 [plan.size].

        float32 where that holds the same numbers: released values lie on a grid, so it usually does.
        """
        with torch_threads(self._policy.limits.threads):  # threads of services that share cores would wait for another
            return self._made(request, name)

    def _made(self, request: Request, name: str) -> np.ndarray:
        plan, client = request.plan, self._policy.node.client
        model = torch.from_numpy(request.model.copy())
        if self._test_seed is None:
            order, noise = self._keys("order", name), self._keys("noise", name)
        else:  # as `clients.LayerwiseClient` in a simulation
            order = KeyRing.from_seed(self._test_seed)
            noise = order.derive(model.numpy().tobytes(), plan.to_json().encode())
        if request.unit == "example":
            return _narrow(self._steps(request, model, noise))
        update = self._update(request, model, order)
        if plan.facts.trust == "local":
            return _narrow(local_release(update, plan, noise, request.round, client)[0].total)
        total = BoundedSum.empty(plan)
        if update is None:
            total.skip(1)
        else:
            total.add(update)
        return total.total.numpy()

    def _keys(self, purpose: str, name: str) -> KeyRing:
        digest = hmac.new(self._secret, f"{purpose} {name}".encode(), hashlib.sha256).digest()
        return KeyRing(int.from_bytes(digest[:16], "little"), secret=True)

    def _update(self, request: Request, model: Tensor, order: KeyRing) -> Updates | None:
        """The raw update, [1, D]; None where there is none, which counts as zero: no data, or training that fails.

        A made-up example has been trained on, so it is this node's data on which training fails: an error in place of
        an answer would tell so, without noise. The operator finds it in the log.
        """
        if not len(self._data):
            return None
        try:
            return self._trained(request, model, order)
        except Exception:
            _log.exception("training on this node's data failed: the release holds noise alone")
            return None

    def _trained(self, request: Request, model: Tensor, order: KeyRing) -> Updates:
        settings = request.work.local()
        stream = order.torch_generator(Purpose.TRAIN, request.round, self._policy.node.client)
        targets = node_data.targets(self._policy.data, self._data.y, request.work.target())
        task = ClientTask(self._data.x, targets, stream, settings.epochs)
        return next(iter(self._resident(request.work, settings).updates(model, [task])))

    def _check_steps(self, work: Work, plan: ReleasePlan) -> None:
        """Refuse, before anything is charged, a model or mechanism that bounds no examples, or not as the plan says."""
        try:
            self._example_trainer(work)
            kept = cast(BoundsExamples, work.built()).scaling(plan).bounds(len(plan.layers))
        except Exception as error:  # of the server's names and options; nothing of it depends on the data
            raise Refusal("work", f"example-level training: {error}"[:300]) from error
        if not (kept <= plan.clip * (1 + 1e-9)).all():
            raise Refusal("plan", "the plan counts on smaller bounds than its mechanism keeps")

    def _steps(self, request: Request, model: Tensor, keys: KeyRing) -> Tensor:
        """The private update of a round of example-level steps, each noised by itself, [plan.size]."""
        targets = node_data.targets(self._policy.data, self._data.y, request.work.target())
        examples = (self._data.x, targets, digest_of(self._data.x, targets))
        trainer, settings = self._example_trainer(request.work), request.work.local()
        client = self._policy.node.client
        return local_steps(trainer, settings, model, examples, request.plan, keys, request.round, client)[0]

    def _resident(self, work: Work, settings: LocalTraining) -> SequentialTrainer:
        key = "updates " + canonical(work.model_dump())
        if self._trainer is None or self._trainer[0] != key:
            self._trainer = None  # two large models need not fit
            made = SequentialTrainer(self._module(work), self._table(work), settings, task=work.target())
            self._trainer = key, made
        return cast(SequentialTrainer, self._trainer[1])

    def _example_trainer(self, work: Work) -> ExampleTrainer:
        key = "steps " + canonical(work.model_dump())
        if self._trainer is None or self._trainer[0] != key:
            self._trainer = None
            made = ExampleTrainer(
                self._module(work), self._table(work), work.built(), task=work.target(), exact_sums=self._exact(work)
            )
            self._trainer = key, made
        return cast(ExampleTrainer, self._trainer[1])

    def _exact(self, work: Work) -> bool:
        """Whether gradients of examples add up in float64: the server asks for it, or this node's policy does."""
        return work.exact_sums or self._policy.privacy.exact_sums

    def _table(self, work: Work) -> LayerTable:
        key = canonical([work.model, work.mechanism, work.group_by])
        if key not in self._layers:
            try:
                with torch.device("meta"):  # nothing is allocated before the size is known
                    module = self._module(work)
                size = sum(parameter.numel() for parameter in module.parameters())
                if size > self._policy.allow.largest_model:
                    raise Refusal("work", f"{size} parameters; at most {self._policy.allow.largest_model} are allowed")
                table = work.built().table(LayerTable.from_module(module, work.group_by))
            except Refusal:
                raise
            except Exception as error:  # options are the server's: anything may be wrong with them
                raise Refusal("work", f"model {work.model.get('name')!r} cannot be built: {error!r}"[:300]) from error
            if len(self._layers) >= 8:
                self._layers.clear()
            self._layers[key] = table
        return self._layers[key]

    def _module(self, work: Work) -> torch.nn.Module:
        options, data = options_of(work.model), self._policy.data
        shape = tuple(data.shape)
        return models.build(work.model["name"], in_shape=shape, classes=data.classes, seed=0, **options)  # type: ignore[arg-type]


def _narrow(total: Tensor) -> np.ndarray:
    """The numbers as float32 where that holds the same ones: released values lie on a grid, so it usually does."""
    wide = total.numpy()
    narrow = np.empty(wide.shape, np.float32)
    with np.errstate(over="ignore"):
        for low in range(0, len(wide), _CHUNK):  # in pieces that stay in the cache
            piece = slice(low, low + _CHUNK)
            narrow[piece] = wide[piece]
            if not (narrow[piece] == wide[piece]).all():
                return wide
    return narrow


_CHUNK = 1 << 16
