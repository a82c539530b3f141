"""Models that are given as a list of NumPy arrays, such as scikit-learn's coefficients, and not as
an `nn.Module`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from fedlgm.errors import ConfigError


def of_arrays(model: Any) -> Any:
    """Convert a list of NumPy arrays or tensors to a module with one parameter for each array. Any
    other object is returned unchanged.

    Parameters are named "0", "1", ..., as Flower names the arrays of an `ArrayRecord`. Values
    become float32.

    Raises:
        ConfigError: an array is complex.

    Example:
        >>> import numpy
        >>> list(of_arrays([numpy.zeros((3, 4)), numpy.zeros(3)]).state_dict())
        ['0', '1']
    """
    if (
        not isinstance(model, list | tuple)
        or not model
        or not all(isinstance(array, np.ndarray | torch.Tensor) for array in model)
    ):
        return model
    complex_ = next(
        (i for i, array in enumerate(model) if torch.as_tensor(array).is_complex()), None
    )
    if complex_ is not None:
        raise ConfigError(
            f"array {complex_} of the model is complex: give its real and imaginary parts as two "
            "arrays"
        )
    return nn.ParameterList([torch.as_tensor(array).detach().float().clone() for array in model])
