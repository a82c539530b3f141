"""Engines are Grids: the same ServerApp, strategy and ClientApp run over each."""
