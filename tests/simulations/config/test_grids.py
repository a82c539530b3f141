import pytest

from fedlgm.errors import ConfigError
from simulations.config.grids import parsed


def test_grids_are_read_from_the_command_line():
    assert parsed(["a.b=1,2.5", "c.d=x,y"]) == {"a.b": [1, 2.5], "c.d": ["x", "y"]}
    for wrong in ("a.b", "a.b=", "=1"):
        with pytest.raises(ConfigError, match="--search takes"):
            parsed([wrong], "--search")
    with pytest.raises(ConfigError, match="twice"):
        parsed(["a.b=1", "a.b=2"])
