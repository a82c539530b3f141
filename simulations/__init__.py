"""Everything that launches: recipes, engines, the Flower app, the command line and reports."""
