import pytest

from fedlgm.errors import ConfigError
from simulations.config.grids import parse_grid


def test_grids_are_read_from_the_command_line():
    assert parse_grid(["a.b=1,2.5", "c.d=x,y"]) == {"a.b": [1, 2.5], "c.d": ["x", "y"]}
    for wrong in ("a.b", "a.b=", "a.b=,", "=1"):
        with pytest.raises(ConfigError, match="--search takes"):
            parse_grid([wrong], "--search")
    with pytest.raises(ConfigError, match="twice"):
        parse_grid(["a.b=1", "a.b=2"])
