"""Code for single papers: baselines, published variants and applications, in one package per paper.

The core does not import these modules. `fedlgm.mechanisms` names their classes and imports them on
first use.
"""
