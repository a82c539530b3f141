"""A deployed run beside the simulation that it must equal."""

from fedlgm_nodes.deploy import processes, submit
from simulations import launch

FIGURES = ("model_sha256", "accuracy", "epsilon", "rounds", "guarantee")


def deployed_like_simulated(folder, recipe, run_dir):
    """The summary of a recipe's run on the nodes of a deployment, which are stopped after it."""
    try:
        processes.up(folder)
        return like_simulated(folder, recipe, run_dir)
    finally:
        processes.down(folder)


def like_simulated(folder, recipe, run_dir):
    """The summary of a recipe's run on the nodes of a deployment that is up."""
    deployed = submit.run(folder, recipe)
    simulated = launch.simulate(recipe, engine="local", run_dir=run_dir)
    for figure in FIGURES:
        assert deployed[figure] == simulated[figure]
    return deployed
