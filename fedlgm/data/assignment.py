"""Partition schemes that `flwr-datasets` does not have, and a version of its Dirichlet scheme that
is fast for very large numbers of clients.

The function of each scheme maps (labels [n], clients, ring) to the number of the client that gets
each sample, its owner (int64 [n], with -1 for no client). The functions use operations on whole
arrays, so that a division among a hundred thousand clients takes only seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import numpy as np

from fedlgm.checks import check_count, check_positive
from fedlgm.errors import ConfigError
from fedlgm.noise.keys import KeyRing, Purpose

_STREAM = 2  # number of this module's random stream below Purpose.PARTITION


def dirichlet_large(labels: np.ndarray, clients: int, ring: KeyRing, *, alpha: float) -> np.ndarray:
    """Divide samples as the scheme "dirichlet" does, with operations on whole arrays, for 100,000
    clients or millions of samples.

    The samples of each class are divided among the clients in proportions p ~ Dirichlet(alpha, ...,
    alpha). With the same seed, this scheme and the scheme "dirichlet" give different divisions.

    Args:
        labels: labels, int [n].
        clients: number of clients; may exceed n.
        ring: source of randomness.
        alpha: concentration, > 0. The smaller it is, the fewer clients share a class.

    Returns:
        The number of the client that gets each sample, int64 [n].

    Raises:
        ConfigError: if an option is out of range.
    """
    check_positive(alpha=alpha)
    rng = ring.numpy_generator(Purpose.PARTITION, _STREAM, 0)
    owner = _empty_assignment(labels)
    _hetero_dirichlet(owner, _members(labels, rng).values(), clients, float(alpha), False, rng)
    return owner


def hsu(labels: np.ndarray, clients: int, ring: KeyRing, *, alpha: float) -> np.ndarray:
    """Divide samples among clients whose sizes differ by at most one, each with its own mixture of
    classes (Hsu, Qi and Brown, 2019).

    Client i draws q_i ~ Dirichlet(alpha * prior), where the prior holds the shares of the classes
    in the data, and then draws its samples with class probabilities q_i, without replacement. When
    a class has no samples left, q_i is renormalised over the remaining classes. The last clients
    therefore get the remaining samples.

    Args:
        labels: labels, int [n].
        clients: number of clients.
        ring: source of randomness.
        alpha: concentration, > 0, in units of the prior, which sums to 1. For K classes of equal
            size, a concentration a for each class (as in Flower's old `create_lda_partitions`)
            corresponds to alpha = K a.

    Returns:
        The number of the client that gets each sample, int64 [n].

    Raises:
        ConfigError: if alpha is out of range.
    """
    check_positive(alpha=alpha)
    rng = ring.numpy_generator(Purpose.PARTITION, _STREAM)
    members = _members(labels, rng)
    left = np.array([len(index) for index in members.values()])
    concentration = float(alpha) * left / left.sum()
    counts = np.zeros((clients, len(members)), dtype=np.int64)
    for client, size in enumerate(_even_sizes(len(labels), clients)[::-1]):
        q = rng.dirichlet(concentration)
        while size:
            p = q * (left > 0)
            # If q is zero for all remaining classes, draw from all remaining samples.
            p = p / p.sum() if p.sum() > 0 else left / left.sum()
            # Draws of a class that has no samples left are rejected and repeated. The result has
            # the same law as single draws with renormalised probabilities.
            taken = np.minimum(rng.multinomial(size, p), left)
            counts[client] += taken
            left -= taken
            size -= taken.sum()
    owner = _empty_assignment(labels)
    _deal(owner, members.values(), counts)
    return owner


def isolation(
    labels: np.ndarray, clients: int, ring: KeyRing, *, private_class: int | None = None
) -> np.ndarray:
    """Divide samples for private-label isolation (LaDP-FL paper, Section VII-A), in which only the
    last client lacks the private class.

    The samples of the private class are divided evenly at random among all clients except the last,
    which is the curious client. All other samples are divided evenly at random among all clients.

    Args:
        labels: labels, int [n].
        clients: number of clients, at least 2.
        ring: source of randomness.
        private_class: the class to hide; by default the largest label.

    Returns:
        The number of the client that gets each sample, int64 [n].

    Raises:
        ConfigError: if there are fewer than two clients or no sample of the private class.
    """
    private = _private(labels, clients, private_class)
    rng = ring.numpy_generator(Purpose.PARTITION, _STREAM)
    owner = _empty_assignment(labels)
    for holders, samples in ((clients, labels != private), (clients - 1, labels == private)):
        index = rng.permutation(np.flatnonzero(samples))
        owner[index] = np.arange(len(index)) % holders
    return owner


def isolation_i(
    labels: np.ndarray,
    clients: int,
    ring: KeyRing,
    *,
    private_class: int | None = None,
    labels_per_client: int = 4,
) -> np.ndarray:
    """Divide samples for label scarcity, Distribution I of the LaDP-FL paper (Section VII-B6).

    Each client except the last has `labels_per_client` labels, including the private label. The
    last client, which is the curious client, has one label fewer, because it lacks the private
    label. All clients have the same number of samples.

    The paper does not say how many samples each client has of each of its labels. Here the private
    class is divided evenly among the clients that have it. The other samples of a client are
    divided evenly over its other labels. The clients get as many samples as the sizes of the
    classes allow. The labels of the clients are chosen so that the number of clients with a class
    is about proportional to the size of the class.

    Args:
        labels: labels, int [n].
        clients: number of clients, at least 2.
        ring: source of randomness.
        private_class: the class to hide; by default the largest label.
        labels_per_client: number of labels of each client except the last, from 2 to the number of
            classes.

    Returns:
        The number of the client that gets each sample, int64 [n], or -1 for samples beyond the
            equal shares.

    Raises:
        ConfigError: if an option is out of range or there are too few samples.
    """
    private = _private(labels, clients, private_class)
    labels_per_client = check_count("labels_per_client", labels_per_client, least=2)
    rng = ring.numpy_generator(Purpose.PARTITION, _STREAM)
    members = _members(labels, rng)
    hidden = members.pop(private)
    public = labels_per_client - 1  # number of public labels of each client, including the last
    if public > len(members):
        raise ConfigError(
            f"labels_per_client={labels_per_client} exceeds the {len(members) + 1} classes of the "
            "labels"
        )
    stock = np.array([len(index) for index in members.values()])
    slots = np.zeros(len(stock), dtype=np.int64)
    choice = np.empty((clients, public), dtype=np.int64)
    for client in range(clients):
        fullest = np.lexsort((rng.random(len(stock)), -stock / (slots + 1)))[:public]
        choice[client] = fullest
        slots[fullest] += 1
    private_share = len(hidden) // (clients - 1)
    # Instead of the private class, the last client gets more samples of its other labels.
    spare = stock.copy()
    spare[choice[-1]] -= -(-private_share // public)
    share = int((spare[slots > 0] // slots[slots > 0]).min())
    if private_share < 1 or share < 1:
        raise ConfigError(
            f"partition scheme 'isolation-i' cannot divide {len(labels)} samples among {clients} "
            f"clients of {labels_per_client} labels: use fewer clients or labels"
        )
    counts = np.zeros((clients, len(stock)), dtype=np.int64)
    np.put_along_axis(counts, choice, share, axis=1)
    counts[-1, choice[-1]] += _even_sizes(private_share, public)
    owner = _empty_assignment(labels)
    _deal(owner, members.values(), counts)
    _deal(owner, [hidden], np.append(np.full(clients - 1, private_share), 0)[:, None])
    return owner


def isolation_ii(
    labels: np.ndarray,
    clients: int,
    ring: KeyRing,
    *,
    private_class: int | None = None,
    alpha: float = 0.01,
) -> np.ndarray:
    """Divide samples with quantity skew, Distribution II of the LaDP-FL paper (Section VII-B6).

    Two heterogeneous Dirichlet divisions are made (as in FedLab's `hetero_dir_partition`, but
    without its unbounded retries): the public classes are divided among all clients, and the
    private class among all clients except the last. At the paper's alpha = 0.01, about half of a
    hundred clients get no samples.

    Args:
        labels: labels, int [n].
        clients: number of clients, at least 2.
        ring: source of randomness.
        private_class: the class to hide; by default the largest label.
        alpha: concentration of both divisions, > 0.

    Returns:
        The number of the client that gets each sample, int64 [n].

    Raises:
        ConfigError: if an option is out of range.
    """
    check_positive(alpha=alpha)
    private = _private(labels, clients, private_class)
    rng = ring.numpy_generator(Purpose.PARTITION, _STREAM)
    members = _members(labels, rng)
    hidden = members.pop(private)
    owner = _empty_assignment(labels)
    _hetero_dirichlet(owner, members.values(), clients, float(alpha), True, rng)
    _hetero_dirichlet(owner, [hidden], clients - 1, float(alpha), True, rng)
    return owner


def natural(labels: np.ndarray, clients: int, ring: KeyRing, *, users: np.ndarray) -> np.ndarray:
    """Divide samples by user, so that no user's samples are split.

    Args:
        labels: labels, int [n]; only n is used.
        clients: number of clients, at most the number of users. With as many clients as users,
            client i is the user with the i-th smallest id. With fewer clients, users are assigned
            at random, and the numbers of users per client differ by at most one.
        ring: source of randomness.
        users: user of each sample, int [n], such as `DataSet.train_user`.

    Returns:
        The number of the client that gets each sample, int64 [n].

    Raises:
        ConfigError: if `users` does not match the labels or there are fewer users than clients.
    """
    users = np.asarray(users)
    if users.shape != labels.shape:
        raise ConfigError(
            f"users must name the user of each of the {len(labels)} samples, got shape "
            f"{users.shape}"
        )
    unique, index = np.unique(users, return_inverse=True)
    if clients > len(unique):
        raise ConfigError(f"{clients} clients exceed the {len(unique)} users of the data")
    client_of = np.arange(len(unique))
    if clients < len(unique):
        client_of = (
            ring.numpy_generator(Purpose.PARTITION, _STREAM).permutation(len(unique)) % clients
        )
    return client_of[index]


def _empty_assignment(labels: np.ndarray) -> np.ndarray:
    """Make an array for the owner of each sample, in which all entries are -1 (no client)."""
    return np.full(len(labels), -1, dtype=np.int64)


def _members(labels: np.ndarray, rng: np.random.Generator) -> dict[int, np.ndarray]:
    """Return the shuffled indices of the samples of each class that occurs, in ascending order of
    the labels.
    """
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    classes, starts = np.unique(labels[by_class], return_index=True)
    return dict(zip(classes.tolist(), np.split(by_class, starts[1:]), strict=True))


def _private(labels: np.ndarray, clients: int, private_class: int | None) -> int:
    """Check and return the class to hide; by default the largest label."""
    check_count("clients (with a private class)", clients, least=2)
    private = int(labels.max()) if private_class is None else private_class
    if private not in labels:
        raise ConfigError(
            f"private_class={private_class!r} is not among the labels: {np.unique(labels).tolist()}"
        )
    return private


def _even_sizes(total: int, parts: int) -> np.ndarray:
    """Split `total` into `parts` integers that differ by at most one."""
    return (total + np.arange(parts)) // parts


def _deal(owner: np.ndarray, members: Iterable[np.ndarray], counts: np.ndarray) -> None:
    """Assign samples to owners: for all i and k, client i gets the next `counts[i, k]` samples of
    the k-th class.
    """
    for index, count in zip(members, counts.T, strict=True):
        owner[index[: count.sum()]] = np.repeat(np.arange(len(count)), count)


def _hetero_dirichlet(
    owner: np.ndarray,
    members: Collection[np.ndarray],
    clients: int,
    alpha: float,
    balance: bool,
    rng: np.random.Generator,
) -> None:
    """Divide each class in Dirichlet proportions among the first `clients` clients or, with
    `balance`, among those of these clients that are below average size.

    With `balance`, the proportions are drawn for these clients alone. This has the same
    distribution as drawing proportions for all clients and renormalising those of these clients,
    but cannot divide zero by zero. Until the last sample is assigned, at least one client is below
    average size.
    """
    sizes = np.zeros(clients, dtype=np.int64)
    average = sum(len(index) for index in members) / clients
    for index in members:
        takers = np.flatnonzero(sizes < average) if balance else np.arange(clients)
        cuts = (np.cumsum(rng.dirichlet(np.full(len(takers), alpha)))[:-1] * len(index)).astype(
            np.int64
        )
        counts = np.diff(np.minimum(cuts, len(index)), prepend=0, append=len(index))
        owner[index] = np.repeat(takers, counts)
        sizes[takers] += counts


WITHOUT_LABELS = ("iid", "natural")
"""Schemes that accept targets of any kind; the other bundled schemes need classes as targets."""
SCHEMES: dict[str, Callable[..., np.ndarray]] = {
    "dirichlet-large": dirichlet_large,
    "hsu": hsu,
    "isolation": isolation,
    "isolation-i": isolation_i,
    "isolation-ii": isolation_ii,
    "natural": natural,
}
