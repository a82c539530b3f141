"""What the commands print: plans, ledgers, results and the state of the machine."""
