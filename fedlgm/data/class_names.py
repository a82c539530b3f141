"""Names of classes, for options that take a class either by its name, such as "bird", or by its
number.
"""

from __future__ import annotations

from fedlgm.data.dataset import DataSet
from fedlgm.errors import ConfigError
from fedlgm.wording import alternatives

_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100 = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus "
    "butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch "
    "crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo "
    "keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain "
    "mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain "
    "plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk "
    "skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone "
    "television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)
_FASHION = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"
_CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
PUBLISHED: dict[str, tuple[str, ...]] = {
    "cifar10": tuple(_CIFAR10.split()),
    "cifar100": tuple(_CIFAR100.split()),
    "fashion-mnist": tuple(_FASHION.split(",")),
    "femnist": tuple(_CHARACTERS),
}
"""Names of the classes of published sets, as the authors give them, in the order of the class
numbers."""


def names_of(data: DataSet) -> tuple[str, ...]:
    """Return the names of a set's classes: the set's labels or, if it has none, the names of the
    published set. The result is empty if the classes have only numbers.
    """
    return data.labels or default_names(data.name)


def default_names(name: str) -> tuple[str, ...]:
    """Return the names of the classes of a published set or of half of such a set; empty for other
    sets.

    Example:
        >>> default_names("cifar10/private")[:2], default_names("digits")
        (('airplane', 'automobile'), ())
    """
    return PUBLISHED.get(name.partition("/")[0], ())


def class_number(data: DataSet, given: int | str) -> int:
    """Return the number of the class that is given by a name, a number, or a number as text. Names
    take precedence over numbers.

    Args:
        data: the set.
        given: the name or number of the class.

    Raises:
        ConfigError: no class of the set has this name or number.

    Example:
        >>> import numpy as np
        >>> x, y = np.zeros((4, 2)), np.array(["cat", "dog", "cat", "dog"])
        >>> own = DataSet.from_arrays((x, y), (x, y))
        >>> class_number(own, "dog"), class_number(own, 0), class_number(own, "1")
        (1, 0, 1)
    """
    names = names_of(data)
    if given in names:
        return names.index(str(given))
    number = int(given) if isinstance(given, int) or given.isdecimal() else -1
    if not isinstance(given, bool) and 0 <= number < (data.classes or 0):
        return number
    classes = f"numbers from 0 to {data.classes - 1}" if data.classes else "no classes"
    said = (
        alternatives(str(given), names, f"{data.name} has {classes}")
        if names
        else f"{data.name} has {classes}"
    )
    raise ConfigError(f"no class {given!r}: {said}")
