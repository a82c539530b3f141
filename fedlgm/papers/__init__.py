"""Code that only one paper needs: baselines, published variants and applications, with one package
per paper.

The core does not import these modules. `fedlgm.mechanisms` names their classes and imports them on
first use.
"""
