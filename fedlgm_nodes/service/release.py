"""Makes a release. The node trains on its data, bounds the update and adds its noise."""

from __future__ import annotations

import copy
import hashlib
import hmac
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from clients import cut_vote
from clients.cut_vote import CutVotes
from clients.source import ClientData
from fedlgm.aggregation.client_release import Asked, Contributions, Keys, Noised, client_release
from fedlgm.errors import ConfigError
from fedlgm.extension.loader import is_bundled
from fedlgm.extension.restored import fresh
from fedlgm.noise.integer import words
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.planning.layers import LayerTable
from fedlgm.training import ClientTask, LocalTraining, SequentialTrainer, inputs, tasks
from fedlgm.training.devices import Numerics, torch_threads
from fedlgm_nodes.policy import Policy, Refusal
from fedlgm_nodes.protocol.messages import canonical
from fedlgm_nodes.service import data as node_data
from fedlgm_nodes.service.naming import Naming
from fedlgm_nodes.service.request import Request, parse_plan
from fedlgm_nodes.service.units import BY_BOUND, NodeUnit
from fedlgm_nodes.service.work import Work
from fedlgm_nodes.service.workshop import Workshop


@dataclass(frozen=True)
class Charged:
    """The budget for a release that was charged to the ledger before training.

    Attributes:
        keys: key rings that are derived from the release's name.
    """

    keys: Keys

    def admit(self, asked: Asked) -> Keys:
        """The key rings of the release, which the service has already admitted."""
        return self.keys

    def charge(self, noised: Noised) -> None:
        """Do nothing, since the release is already charged."""


class Releaser:
    """Makes releases from the node's data. The data and the trainer stay in memory.

    Args:
        policy: the node's policy.
        data: examples of the node.
        data_digest: digest of the examples.
        secret: the node's noise key, 32 random bytes from the operating system.
        test_seed: for tests only, the seed of a simulation whose noise the releases get. Such noise
            protects nothing.
    """

    def __init__(
        self,
        policy: Policy,
        data: ClientData,
        data_digest: str,
        secret: bytes,
        test_seed: int | None = None,
    ) -> None:
        self.policy, self._data, self.data_digest, self._secret = policy, data, data_digest, secret
        policy.allow.check_names()
        for name in policy.allow.tasks:
            # unsuitable data are refused now, not in the middle of a run
            node_data.targets(policy.data, data.y, tasks.get(name))
        self._test_seed = test_seed
        self.workshop = Workshop(policy)
        self._tried: tuple[str, str, bool] | None = None  # the work that `prepare` tried last

    def warm(self) -> None:
        """Train a small model for one step on the first example, so that later training starts
        faster.

        Raises:
            ConfigError: no model fits the policy's data.
        """
        work = Work(mechanism={"name": "gaussian"}, model={"name": "logistic"})
        try:
            module = self.workshop.module(work)
        except Refusal as refusal:
            raise ConfigError(
                f"data.shape and data.classes of the policy fit no model: {refusal.why}"
            ) from refusal
        layers = LayerTable.from_module(module)
        order = KeyRing.from_seed(0).torch_generator(Purpose.TRAIN, 0, 0)
        if len(self._data):
            model, label = layers.flatten(module), torch.zeros(1, dtype=torch.int64)
            task = ClientTask(inputs.take(self._data.x, slice(0, 1)), label, order, 1)
            next(iter(SequentialTrainer(module, layers, LocalTraining()).updates(model, [task])))

    def understand(
        self, round: int, plan: str, work: Work, model: np.ndarray | None = None
    ) -> Request:
        """Build the objects of a work, parse the release's plan and check it against the policy. If
        no model is given, a model of zeros takes its place.

        Raises:
            Refusal: the question is malformed or not allowed. The reason does not depend on the
                data.
        """
        job = self.workshop.job(work)
        layers = job.layers
        if model is None:
            model = np.zeros(layers.size, np.float32)
        elif len(model) != layers.size:
            raise Refusal(
                "model",
                f"the question brings {len(model)} numbers, but the model has "
                f"{layers.size} parameters",
            )
        elif not np.isfinite(model).all():
            raise Refusal("model", "the model holds NaN or Inf")
        request = Request(
            round, parse_plan(layers, plan, self.policy), plan, model, work, self.data_digest
        )
        _unit(request).check(job, request.plan)
        return request

    def name(self, request: Request, run: str, cohort: str = "") -> str:
        """The release's name, as the service computes it (see `Naming.name`)."""
        naming = Naming(self.policy, self._secret, self.data_digest, torch.__version__)
        return naming.name(request, run, cohort)

    def prepare(self, request: Request) -> None:
        """Build the objects of a release and try them on an artificial example. The service calls
        this before it charges anything.

        Raises:
            Refusal: the objects would fail on any data of this node, for example because the model
                needs inputs of another shape.
        """
        tried = (
            _unit(request).name,
            canonical(request.work.values()),
            cut_vote.asked_for(request.plan),
        )
        if tried == self._tried:
            return
        trainer, task = (
            self.workshop.trainer(request.work, _unit(request)),
            self.workshop.job(request.work).task,
        )
        model, targets = torch.from_numpy(request.model.copy()), self._data.y
        try:
            with torch_threads(self.policy.limits.threads):
                x = torch.zeros(1, *self.policy.data.shape)
                y = node_data.targets(
                    self.policy.data, torch.zeros(1, *targets.shape[1:], dtype=targets.dtype), task
                )
                _unit(request).try_on(trainer, model, x, y, request.plan)
                # votes are computed from losses in evaluation mode
                if cut_vote.asked_for(request.plan):
                    updates = torch.zeros(1, len(model))
                    self._votes(request).add_votes(updates, request.plan, model, [ClientData(x, y)])
        except (
            Exception
        ) as error:  # it follows from the server's names and options or the operator's own model
            raise Refusal("work", f"training fails on any data: {error}"[:300]) from error
        self._tried = tried

    def make(self, request: Request, name: str) -> np.ndarray:
        """Make the numbers of a charged release, which are bounded and, under local trust, noised,
        [plan.size].

        The dtype is float32 if it represents all numbers exactly, and otherwise float64. It usually
        does, since released values lie on a grid.
        """
        wide = self._release(request, name).numpy()
        with np.errstate(over="ignore"):
            narrow = wide.astype(np.float32)
        return narrow if np.array_equal(narrow, wide) else wide

    def words(self, request: Request, name: str) -> np.ndarray:
        """Make the node's charged vector for a secure sum, which is bounded, rounded and has the
        node's share of the noise, uint32 [size].
        """
        return words(self._release(request, name).numpy())

    def _release(self, request: Request, name: str) -> Tensor:
        model = torch.from_numpy(request.model.copy())
        if self._test_seed is None:
            keys = Keys(self._keys("order", name), self._keys("noise", name))
        else:  # the same keys as `clients.LayerwiseClient` has in a simulation
            seeded = KeyRing.from_seed(self._test_seed)
            keys = Keys(
                seeded, seeded.derive(model.numpy().tobytes(), request.plan.to_json().encode())
            )
        asked = Asked(request.plan, model, request.round, [self.policy.node.client])
        # the number of threads is limited, because the threads of services on the same cores would
        # wait for each other
        with torch_threads(self.policy.limits.threads):
            return client_release(self._contributions(request), Charged(keys), asked).total

    def _contributions(self, request: Request) -> Contributions:
        """The node's contribution to a release, not yet computed."""
        job = self.workshop.job(request.work)

        def client_data(
            client: int,
        ) -> ClientData:  # called where an error in this node's data is caught
            # a task that the operator has written could store targets, and use them for other
            # targets or for losses
            task = fresh(job.task)

            def targets(y: Tensor) -> Tensor:
                return node_data.targets(self.policy.data, y, copy.copy(task))

            return _unit(request).examples(self._data, targets, apart=not is_bundled(job.task))

        trainer, votes = (
            self.workshop.trainer(request.work, _unit(request)),
            partial(self._votes, request),
        )
        return _unit(request).contributions(
            job, trainer, client_data, votes, Numerics(self.policy.limits.threads)
        )

    def _votes(self, request: Request) -> CutVotes:
        job = self.workshop.job(request.work)
        return CutVotes(self.workshop.module(request.work), job.layers, job.task)

    def _keys(self, purpose: str, name: str) -> KeyRing:
        digest = hmac.new(self._secret, f"{purpose} {name}".encode(), hashlib.sha256).digest()
        return KeyRing(int.from_bytes(digest[:16], "little"), secret=True)


def _unit(request: Request) -> NodeUnit:
    """The unit that a release protects."""
    return BY_BOUND[request.plan.bounded_by]
