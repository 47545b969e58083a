"""The driver: command lines around `hpm` that train, measure and report."""
