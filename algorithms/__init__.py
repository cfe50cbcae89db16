"""Differentially private training algorithms on dpkernels."""
