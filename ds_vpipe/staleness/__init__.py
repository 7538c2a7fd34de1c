"""What a stage does about gradients that are some updates old, as plain data and around any torch optimizer."""
